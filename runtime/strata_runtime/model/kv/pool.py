"""The memory of a slot's KV pool: what is stored when keys and values are appended, and what attention gets back.

Made by PagedKvCache, layer by layer, so that layers move to another cache with what they hold; each layer's part is read by `attention`. Knows places and
pages, no sequences. Bytes are those of `contract.kv`.

On a processor all places of a head lie together: a thread reads one head's pages. On a GPU pages do, as kernels for block tables have them:
[pages, page_tokens, kv_heads, head_dim], here and in torch's `varlen_attn`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from strata_runtime.huge_pages import untouched
from strata_runtime.kernels import native_pages
from strata_runtime.kernels.native_attention import Entries
from strata_runtime.model.kv.rounding import SCALE_TYPE, restore, round_entries


@dataclass(frozen=True)
class PoolShape:
    """`dtype`: the compute type, that of keys and values as attention sees them."""

    pages: int
    page_tokens: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    page_major: bool = False  # how it lies; what tensors of the pool are called stays the same

    @property
    def gathered_page_bytes(self) -> int:
        """Keys and values of one page of one layer, as attention sees them."""
        return 2 * self.kv_heads * self.page_tokens * self.head_dim * self.dtype.itemsize


class LayerPool(ABC):
    """One layer's part of the pool. A place is page * page_tokens + position in the page.

    `kind`: its bits, and whether an entry is key and value at once, as `make_pool` takes them.
    """

    kind: tuple[int, bool] = (16, False)
    entries: Entries | None = None  # where the native library finds them; None: it does not read such a pool
    pages: Entries | None = (
        None  # where GPU kernels do, [pages, page_tokens, kv_heads, head_dim] each; None: they do not
    )

    def __init__(self, shape: PoolShape, storage: tuple[Tensor, ...]) -> None:
        """`storage`: [2, kv_heads, places, ...] each, all that it holds."""
        self.shape = shape
        self.storage = storage

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.storage)

    @abstractmethod
    def store(self, places: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """key, value: [kv_heads, tokens, head_dim] to `places` [tokens]. Returns both as `gather` would give them back."""

    @abstractmethod
    def gather(self, pages: Tensor) -> Tensor:
        """pages: [P] -> keys and values [2, kv_heads, P * page_tokens, head_dim] in the compute type."""


class PlainPool(LayerPool):
    """Keys and values as they are: storage [2, kv_heads, pages * page_tokens, head_dim] in the compute type."""

    def __init__(self, shape: PoolShape, storage: Tensor) -> None:
        super().__init__(shape, (storage,))
        self._keys, self._values = storage[0], storage[1]
        if shape.page_major:
            self.pages = Entries(_as_pages(self._keys, shape), _as_pages(self._values, shape))
            self._pages = storage.view(2, shape.kv_heads, shape.pages, shape.page_tokens, shape.head_dim)
        else:
            self.entries = Entries(self._keys, self._values)
            self._pages = _by_page(storage, shape)

    def store(self, places: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self._keys.index_copy_(1, places, key)
        self._values.index_copy_(1, places, value)
        return key, value

    def gather(self, pages: Tensor) -> Tensor:
        return self._pages.index_select(2, pages).reshape(2, self.shape.kv_heads, -1, self.shape.head_dim)


class RoundedPool(LayerPool):
    """Keys and values as int8 with a scale per token and head.

    codes: int8 [2, kv_heads, pages * page_tokens, head_dim]; scales: bfloat16 [2, kv_heads, pages * page_tokens]. A token's codes depend on
    that token alone, so a replay stores the same bits however its tokens are packed; and a chunk attends to its own tokens as rounded, as
    later ones will see them.
    """

    def __init__(self, shape: PoolShape, codes: Tensor, scales: Tensor) -> None:
        super().__init__(shape, (codes, scales))
        self.kind = (8, False)
        self._codes, self._scales = codes, scales
        if shape.page_major:
            own, held = (_as_pages(each, shape) for each in scales)
            self.pages = Entries(_as_pages(codes[0], shape), _as_pages(codes[1], shape), (own, held))
        else:
            self.entries = Entries(codes[0], codes[1], (scales[0], scales[1]))
        self._scale_pages = scales.view(2, shape.kv_heads, shape.pages, shape.page_tokens)
        self._code_pages = codes.view(*self._scale_pages.shape, shape.head_dim)
        self._native = not shape.page_major and native_pages.takes(shape.device)

    def store(self, places: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return self._store_one(0, places, key), self._store_one(1, places, value)

    def _store_one(self, place: int, places: Tensor, entries: Tensor) -> Tensor:
        if self._native:
            return native_pages.store(entries, places, self._codes[place], self._scales[place])
        codes, scales = round_entries(entries)
        self._codes[place].index_copy_(1, places, codes)
        self._scales[place].index_copy_(1, places, scales)
        return restore(codes, scales, self.shape.dtype)

    def gather(self, pages: Tensor) -> Tensor:
        if self._native:
            return native_pages.gather(self._code_pages, self._scale_pages, pages, self.shape.dtype)
        codes, scales = self._code_pages.index_select(2, pages), self._scale_pages.index_select(2, pages)
        return restore(codes.flatten(2, 3), scales.flatten(2), self.shape.dtype)


class LatentPool(LayerPool):
    """One entry for key and value: half of it lies where a key would, half where a value would."""

    def __init__(self, shape: PoolShape, halves: LayerPool) -> None:
        super().__init__(shape, halves.storage)
        self.kind = (halves.kind[0], True)
        self._halves = halves

    def store(self, places: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002  is the key
        halves = (half.contiguous() for half in key.chunk(2, dim=-1))
        entry = torch.cat(self._halves.store(places, *halves), dim=-1)
        return entry, entry

    def gather(self, pages: Tensor) -> Tensor:
        entry = torch.cat(self._halves.gather(pages).unbind(0), dim=-1)
        return entry.expand(2, *entry.shape)


def make_pool(shape: PoolShape, kv_bits: int, *, latent: bool = False) -> LayerPool:
    """Of one layer. Taken and touched now rather than in mid-stream; zeros keep masked padding finite. `latent`: an entry is key and value at once."""
    if latent:
        return LatentPool(shape, make_pool(replace(shape, head_dim=shape.head_dim // 2), kv_bits))
    places = (2, shape.kv_heads, shape.pages * shape.page_tokens)
    entries = (*places, shape.head_dim)
    if kv_bits == 16:
        return PlainPool(shape, _touched(entries, shape.dtype, shape))
    return RoundedPool(shape, _touched(entries, torch.int8, shape), _touched(places, SCALE_TYPE, shape))


def with_pages(held: LayerPool, pages: int) -> LayerPool:
    """A pool of so many pages, with what `held` has in those that both have; the same where it has as many."""
    if held.shape.pages == pages:
        return held
    bits, latent = held.kind
    made = make_pool(replace(held.shape, pages=pages), bits, latent=latent)
    places = min(held.shape.pages, pages) * held.shape.page_tokens
    for source, target in zip(held.storage, made.storage, strict=True):
        target[:, :, :places].copy_(source[:, :, :places])
    return made


def _touched(size: tuple[int, ...], dtype: torch.dtype, shape: PoolShape) -> Tensor:
    """[2, kv_heads, places, ...]; page-major: the same over memory in which each place has all its heads."""
    if not shape.page_major:
        return untouched(torch.empty(size, dtype=dtype, device=shape.device)).zero_()
    two, heads, places, *rest = size
    return untouched(torch.empty((two, places, heads, *rest), dtype=dtype, device=shape.device)).zero_().transpose(1, 2)


def _as_pages(entries: Tensor, shape: PoolShape) -> Tensor:
    """[kv_heads, places, ...] of a page-major pool -> [pages, page_tokens, kv_heads, ...], contiguous."""
    return entries.transpose(0, 1).view(shape.pages, shape.page_tokens, *entries.shape[:1], *entries.shape[2:])


def _by_page(storage: Tensor, shape: PoolShape) -> Tensor:
    """Whole pages of a head are rows: they are copied faster than page and place apart."""
    return storage.view(2, shape.kv_heads, shape.pages, shape.page_tokens * shape.head_dim)
