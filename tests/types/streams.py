"""What a stream is made of, as mypy sees it: each store and each channel of the library is one in every argument. It is not run."""

from __future__ import annotations

from danling.stream import (
    DirectoryStore,
    FeatureStore,
    FileChannel,
    MemoryChannel,
    MemoryStore,
    MooncakeStore,
    RefChannel,
    SQLiteChannel,
)

stores: list[FeatureStore] = [
    MemoryStore(),
    DirectoryStore("store"),
    MooncakeStore("127.0.0.1:50051"),
]
channels: list[RefChannel] = [MemoryChannel(), FileChannel("log"), SQLiteChannel("log.sqlite")]
