"""Paths of OpenAI's and vLLM's interfaces that no deployment of ours serves. Used by `app` to say so by name."""

from strata_runtime.gateway.errors import NotFoundError

_MAKES = {  # path, with all below it: what it is for
    "/v1/embeddings": "embeddings",
    "/v1/audio": "speech",
    "/v1/images": "images",
    "/v1/moderations": "moderation",
    "/v1/rerank": "ranking",
    "/v2/rerank": "ranking",
    "/rerank": "ranking",
    "/v1/score": "scores",
    "/score": "scores",
    "/pooling": "pooling",
    "/classify": "classification",
}


def unserved(method: str, path: str) -> NotFoundError | None:
    """What to say about a path without a route; None where nothing is known of it."""
    for known, what in _MAKES.items():
        if path == known or path.startswith(f"{known}/"):
            return NotFoundError(
                f"{method} {path}: this deployment serves text generation only, no {what}; use /v1/chat/completions or "
                "/v1/completions here, and another server for this",
                code="unsupported_endpoint",
            )
    return None
