"""One LLMDeployment through its life, in the order of these files; a package, so that the fixture of it ends with the last of them."""
