"""`monolith publish status | pause | resume | rollback`: control the rows that a run publishes to servers."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence

from monolith.cli.options.jobs import (
    PublishPauseOptions,
    PublishResumeOptions,
    PublishRollbackOptions,
    PublishStatusOptions,
)
from monolith.cluster.security import SecurityConfig
from monolith.observe.progress import describe_bytes
from monolith.runtime.publish_pause import when_utc
from monolith.sync.publish_messages import ShardPublishStatus
from monolith.wire.messages import write_message

_ADDRESS = re.compile(r"[^/\\]+:[0-9]{1,5}")


def status(options: PublishStatusOptions) -> int:
    """Print the status of publishing."""
    return _order(options, "status")


def pause(options: PublishPauseOptions) -> int:
    """Pause publishing."""
    return _order(options, "hold", reason=options.reason)


def resume(options: PublishResumeOptions) -> int:
    """Resume publishing."""
    return _order(options, "resume", *(("release",) if options.include_withheld else ()))


def rollback(options: PublishRollbackOptions) -> int:
    """Roll servers back to a version."""
    return _order(options, "rollback", version=options.version)


def _order(options: PublishStatusOptions, *actions: str, reason: str = "", version: str = "") -> int:
    from monolith.train.hooks import ControlClient

    security = SecurityConfig(
        token_file=options.token_file, cert=options.tls_cert, key=options.tls_key, ca=options.tls_ca
    )
    by_address = _ADDRESS.fullmatch(options.run) is not None
    model_dir, address = ("", options.run) if by_address else (options.run, None)
    with ControlClient(model_dir, address=address, security=security) as job:
        for action in actions:
            shares = job.publish(action, reason=reason, version=version)
    if options.json:
        sys.stdout.write(json.dumps({"shares": [write_message(one) for one in shares]}) + "\n")
    else:
        sys.stdout.write("".join(f"{line}\n" for line in describe(shares)))
    return 0


def describe(shares: Sequence[ShardPublishStatus]) -> list[str]:
    """Return a line for each share, for people."""
    if not shares:
        return ["nothing is published yet: the run is starting"]
    return [_line(one) for one in shares]


def _line(one: ShardPublishStatus) -> str:
    state = "publishing"
    if one.held:
        state = f"PAUSED since {when_utc(one.since)}: {one.reason}" if one.since else f"PAUSED: {one.reason}"
    if one.version is not None:
        state += f"; servers that have version {one.version} serve it"
    if one.held and one.version is None and one.first_bad_step is not None:
        state += f"; exported versions from step {one.first_bad_step:,} on are withheld"
    return (
        f"shard {one.share} of {one.shares}: {state}. Step {one.step:,}, delta {one.sequence:,} of epoch "
        f"{one.epoch[:8] or 'none'}; {one.rows:,} rows, {describe_bytes(one.bytes)}, {one.errors:,} errors, "
        f"{one.resyncs:,} resyncs"
    )
