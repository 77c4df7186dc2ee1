"""Numbers that several packages must agree on, each once, with its reason.

A plan predicts with them what the loader, the dispatcher and the server do later: defined twice, they would drift apart
and budgets would not hold. A number that only one package uses stays in that package.
"""

from __future__ import annotations

ALIGNMENT = 512
"""Alignment in bytes of each tensor in a packed buffer: that of CUDA's allocator, which vectorised kernels expect.
Profiles count with it, and dispatch lays blocks out by it."""

FILE_ALIGNMENT = 4096
"""Alignment in bytes of reads that bypass the page cache. Checkpoints are written with tensors aligned to it."""

HOST_ALIGNMENT = 64
"""Alignment in bytes of tensors that torch allocates on the host, and of those in files written for offloading."""

VECTOR_BYTES = 16
"""Alignment in bytes that weights need which the host computes with: kernels for less take other code paths, whose last
bits differ."""

DEFAULT_SLOTS = 2
"""Streamed parts that are on the main device at once by default: one runs while the next arrives."""

NEARLY_ALL_EXPERTS = 7 / 8
"""Share of a module's experts from which on a call prefetches all experts of the next module, which will use nearly all
of them, too. Dispatch acts by it, and predicted seconds depend on it."""

MOST_GROUPS = 512
"""Upper bound of the slots that one call of an experts function gets: CUDA's grouped product takes fewer than 1024.
Predicted bytes depend on it."""

RESTORE_BUFFERS = 2
"""Quantised parts that are staged on the device at once: one is restored while the next arrives."""

SPARE_MICRO_BATCHES = 1
"""Micro-batches of a forward that are in the stages of a model beyond one for each accelerator: it waits while the host
launches the next. Plans count the memory of all of them."""

WAVES = 2
"""Waves of experts that share a cache's slots if a call uses more experts than there are slots: one wave computes while
the next is fetched. The predicted bytes of a call depend on it."""

READ_AHEAD_BYTES = 64 * 2**20
"""Bytes of the next part on disk that are paged in while one computes: one large request, so that the time between two
requests is negligible."""

CHUNK_BYTES = 8 * 2**20
"""Bytes of one read at most: enough for the full bandwidth of disk and link; a power of two, of which pinned memory
takes multiples only."""

MOST_CHUNK_BYTES = 2 * CHUNK_BYTES
"""The same where more threads read than `READERS`: each read takes Python's lock a dozen times, and the thread that
launches compute waits for it."""

MIN_CHUNK_BYTES = 64 * 2**10
"""Smallest size of a read in bytes, for models with small blocks; of still smaller ones, a whole block."""

STAGING_BYTES = 6 * CHUNK_BYTES
"""Upper bound of the host memory through which parts on disk reach an accelerator: six chunks. Two are being filled,
two are full, and two are being copied."""

GRADIENT_BYTES = 2 * CHUNK_BYTES
"""Upper bound of the pinned memory through which gradients of streamed weights reach the host: two pieces, of which one
arrives while the host empties the other; a power of two."""

READERS = 2
"""Threads that read from disk at once: a single one leaves the disk idle whenever compute takes its core. The speed of
a disk is measured with as many."""

MOST_READERS = 8
"""Upper bound of these threads: a plan has as many as the machine's disk and cores are worth."""

PLANNED_SHARE = 0.9
"""Share of the free memory that is planned with if no budgets are given; the rest is for other programs, device
contexts and fragmentation."""

PINNED_SHARE = 0.5
"""Upper bound of the share of the host's memory that is pinned by default: pinned memory cannot be swapped out."""

RESIDENT_SHARE = 0.95
"""Share of the host's free memory that pages of files may take, mapped or read through the page cache; the rest is for
other programs."""

CACHED_SHARE = 0.7
"""Share of the host's total memory up to which the kernel is expected to cache a model's files from pass to pass."""

KV_BLOCK_BYTES = 4 * 2**20
"""Keys, or values, of one layer that lie on the host are in blocks of so many bytes: large enough for the link's full
speed."""

KV_BLOCKS = 4
"""Blocks, at least, of keys, or values, of one layer of which RAM holds the most recent: the oldest is written to disk
as a whole, so that of what RAM may hold no more than a fourth is empty."""

KV_SLOTS = 2
"""Layers whose keys and values on the host have memory on the accelerator at once: one computes, one is fetched."""

KV_PAGE = 128
"""Positions of a page of a server's keys and values: a prompt is attended to, and cached, in blocks of as many. Plans
count whole pages."""

KV_SPARE_PAGES = 4
"""Pages of a server that RAM and the disk both have: they are written ahead, so that a step that needs memory for new
pages does not wait for the disk."""

KV_SHARE = 0.25
"""Share of a device's free memory that a server takes for keys and values if the plan reserves none."""

UNKNOWN_SHARE = 0.2
"""Share of an accelerator's budget that is kept free, where that can be, beside activations that were measured in one
forward: the next inputs may be larger."""

RENDEZVOUS_PORT = 29500
"""Default port at which processes of a launch meet: that of torch.distributed."""

SHARD_SIZE = "10GB"
"""Default size of the largest file of weights that an Accelerator saves and that sharded ones are merged into: that of
accelerate."""

ACCEPTANCE = 0.7
"""Expected probability that a proposed token is accepted if those before it were: draft models and heads that predict
further tokens are reported between 0.6 and 0.9."""

UNKNOWN_NEW_TOKENS = 128
"""New tokens of a job if their number is not given."""
