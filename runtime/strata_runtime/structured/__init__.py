"""Structured output: grammars, compiled over a model's vocabulary. Used by the gateway, which looks at them first, and by last stages."""
