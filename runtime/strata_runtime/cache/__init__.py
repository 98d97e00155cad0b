"""Paged KV: who owns which pages of a slot's pool, and attention over them."""

from strata_runtime.cache.batch import Batch
from strata_runtime.cache.paged import PagedKvCache

__all__ = ["Batch", "PagedKvCache"]
