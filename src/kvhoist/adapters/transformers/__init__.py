"""Generation with transformers, with prefix reuse over device, host memory and disk.

`CachedModel` wraps a causal language model; the rest is what it takes and gives. Importing this registers the attention
implementation `PREFIX_ATTENTION` with transformers. Raises MissingDependencyError on import where torch or transformers
is not installed.
"""

import kvhoist.adapters.transformers._require  # noqa: F401  (before anything imports torch)
from kvhoist.adapters.transformers.attention import PREFIX_ATTENTION, register_attention
from kvhoist.adapters.transformers.model import DEFAULT_PAGE_TOKENS, CachedModel
from kvhoist.adapters.transformers.report import Generation, GenerationReport
from kvhoist.adapters.transformers.sampling import GREEDY, Sampling
from kvhoist.adapters.transformers.shape import CachedPart, CacheShape, probe_shape
from kvhoist.adapters.transformers.stream import CancelToken, Piece, Stream

__all__ = [
    "DEFAULT_PAGE_TOKENS",
    "GREEDY",
    "PREFIX_ATTENTION",
    "CacheShape",
    "CachedModel",
    "CachedPart",
    "CancelToken",
    "Generation",
    "GenerationReport",
    "Piece",
    "Sampling",
    "Stream",
    "probe_shape",
]

register_attention()
