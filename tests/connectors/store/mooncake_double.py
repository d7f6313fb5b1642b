"""Mooncake's client as far as the store uses it: its calls and answers as measured on release 0.3.13."""

from __future__ import annotations

import ctypes

NOT_FOUND = -704
INVALID = -600


class Cluster:
    """State shared by several clients."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.silent = False
        """The master does not answer."""


class DoubleClient:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.regions: dict[int, int] = {}
        self.set_up_with: tuple[object, ...] = ()

    def setup(self, *settings: object) -> int:
        self.set_up_with = settings
        return INVALID if self._cluster.silent else 0

    def register_buffer(self, address: int, size: int) -> int:
        self.regions[address] = size
        return 0

    def unregister_buffer(self, address: int) -> int:
        del self.regions[address]
        return 0

    def close(self) -> int:
        assert not self.regions, "memory would be freed while it is registered"
        return 0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [-1 if self._cluster.silent else int(key in self._cluster.values) for key in keys]

    def batch_put_from(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        for key, address, size in zip(keys, addresses, sizes, strict=True):
            self._check(address, size)
            self._cluster.values.setdefault(key, ctypes.string_at(address, size))
        return [0] * len(keys)

    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        answers = []
        for key, address, size in zip(keys, addresses, sizes, strict=True):
            self._check(address, size)
            value = self._cluster.values.get(key)
            if value is None:
                answers.append(NOT_FOUND)
            elif len(value) > size:
                answers.append(INVALID)
            else:
                ctypes.memmove(address, value, len(value))
                answers.append(len(value))
        return answers

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        assert force, "a value under lease would stay"
        return [0 if self._cluster.values.pop(key, None) is not None else NOT_FOUND for key in keys]

    def _check(self, address: int, size: int) -> None:
        assert any(low <= address and address + size <= low + length for low, length in self.regions.items())
