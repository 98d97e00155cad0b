"""The ranks of one stage: what each holds of a model that is cut over several devices, and how they add up what each has computed."""
