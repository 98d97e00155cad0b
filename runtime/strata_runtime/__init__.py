"""The runtime: one stage of a pipeline is one slot. It knows a Plan, never Kubernetes."""
