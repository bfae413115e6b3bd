"""The integers that name things, as distinct types.

Owned by nobody: every process uses them. A request has two names: `RequestKey`, chosen by the
frontend that accepted it and unique on that link, and `RequestId`, given by the core at arrival and
unique in a trace log.
"""

from typing import NewType

RequestKey = NewType("RequestKey", int)
"""Names a request on one frontend link; increases with every request of that frontend."""

RequestId = NewType("RequestId", int)
"""Names a request in the core, the worker and the log; increases in order of arrival."""

BlockId = NewType("BlockId", int)
"""Index of a KV block in the pool, 0 <= block < num_blocks."""

StepId = NewType("StepId", int)
"""Number of a step, from 0."""

BlockHash = NewType("BlockHash", bytes)
"""16 bytes that identify a full block's content and everything before it (`block_hash.py`)."""
