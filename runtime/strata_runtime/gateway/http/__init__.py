"""The gateway's HTTP side: the shapes of OpenAI's API, their parameters and answers."""
