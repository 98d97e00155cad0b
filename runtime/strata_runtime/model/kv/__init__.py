"""Paged KV: who owns which pages of a slot's pool, and attention over them."""

from strata_runtime.model.kv.batch import Batch
from strata_runtime.model.kv.paged import PagedKvCache

__all__ = ["Batch", "PagedKvCache"]
