"""The LLMDeployment (strata.dev/v1alpha1): its types, and how a file or an object becomes one.

| module | what it holds                                                        |
|--------|----------------------------------------------------------------------|
| base   | the strict, frozen base of the types, and rules said in CEL and Python |
| spec   | what a user asks for                                                 |
| status | what the operator reports                                            |
| load   | YAML or a Kubernetes object -> LLMDeployment, with errors that teach |
"""

from strata_operator.api.load import deployment_from_object, load_deployment
from strata_operator.api.spec import API_VERSION, GROUP, KIND, PLURAL, VERSION, LLMDeployment, LLMDeploymentSpec
from strata_operator.api.status import Condition, LLMDeploymentStatus, Phase

__all__ = [
    "API_VERSION",
    "GROUP",
    "KIND",
    "PLURAL",
    "VERSION",
    "Condition",
    "LLMDeployment",
    "LLMDeploymentSpec",
    "LLMDeploymentStatus",
    "Phase",
    "deployment_from_object",
    "load_deployment",
]
