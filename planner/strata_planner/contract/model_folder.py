"""What Strata's commands leave beside a model's checkpoint: written and read by the runtime, looked for by whoever plans."""

ANY_PRECISION_FOLDER = "strata-any"  # of `strata quantize`: planes and tables of every layer
MANIFEST_FILE = "manifest.json"  # in that folder
ACTIVATIONS_FILE = "strata-activations.safetensors"  # calibrated ranges of activations
