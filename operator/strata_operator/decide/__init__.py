"""What to do: from what is seen of a deployment to actions, status and plans to ask for. Pure."""
