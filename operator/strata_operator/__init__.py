"""The operator: turns an LLMDeployment into running slots, on Kubernetes or as local processes."""
