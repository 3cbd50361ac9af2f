"""What can go wrong with an object store, whatever its kind."""

from __future__ import annotations

from danling.checkpoints.errors import CheckpointError


class RemoteError(CheckpointError):
    """An object store did not do what it was asked for."""


class RemoteMissing(RemoteError):
    """There is no such object, or no such bucket."""


class RemoteExists(RemoteError):
    """An object that was to be created is there already."""


class RemoteConflict(RemoteError):
    """An object that was to be replaced is another one by now, or gone."""


class RemoteDenied(RemoteError):
    """The credentials are missing, have expired, or do not allow the request. To try again without others is no use."""


class RemoteUnavailable(RemoteError):
    """The store could not be reached, did not answer in time, or could not store the data. A later attempt may succeed."""
