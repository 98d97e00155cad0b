"""A stage: the worker that receives, runs its layers and sends on; on the last stage, the sampler. Knows no requests."""
