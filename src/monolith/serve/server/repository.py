"""The models of a server: which versions are loaded, and how a new version replaces the old one.

Folders are polled. A new version is loaded and warmed up while the old one still answers. Then one assignment
makes it the version that answers (the hot swap), and the old version is retired: requests that lease it
finish, and the last lease to end closes it. No request ever meets a closed version.

    found ──► LOADING ──► READY ──a newer version is ready──► UNLOADING ──last lease ends──► closed
                 └──fails──► UNAVAILABLE, with the reason: the old version still answers

A withheld version, whose rows are not trusted, is UNAVAILABLE as well. If it is withheld while it answers,
the newest version that is not withheld replaces it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from monolith import concurrency
from monolith.errors import MonolithError, UnavailableError, UnknownModelError
from monolith.serve.config import ServedFolder
from monolith.serve.metrics import VersionStatistics
from monolith.serve.predictor import Predictor
from monolith.serve.server.batching import RequestBatcher
from monolith.serve.server.catalog import ServableCatalog

_log = logging.getLogger(__name__)

RETRY_AFTER = 30.0
"""Seconds after which loading a failed version is retried."""


class LoadedVersion:
    """A version that answers, with the number of its leases.

    The repository has one lease itself, so the count reaches 0 only after `retire`, exactly once.
    """

    def __init__(self, model: Predictor, batcher: RequestBatcher, statistics: VersionStatistics) -> None:
        self.model = model
        self.batcher = batcher
        self.statistics = statistics
        self._lock = concurrency.Lock()  # guards the two below; closing happens outside of it
        self._leases = 1  # the repository
        self._retired = False

    def acquire(self) -> bool:
        """Take a lease, until `release`; return False for a version that was retired."""
        with self._lock:
            if self._retired:
                return False
            self._leases += 1
            return True

    def release(self) -> None:
        with self._lock:
            self._leases -= 1
            last = self._leases == 0
        if last:
            self.model.close()

    def retire(self) -> None:
        """Have it closed when its last lease ends."""
        with self._lock:
            if self._retired:
                return
            self._retired = True
        self.release()

    @property
    def is_leased(self) -> bool:
        with self._lock:
            return self._leases > 0


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One line of the repository index."""

    name: str
    version: str
    state: str
    reason: str = ""


@dataclass(slots=True)
class _Folder:
    """The state of one model's folder. Only the thread that holds `Repository._changing` changes it."""

    config: ServedFolder
    pinned: frozenset[str] = frozenset()
    """Versions that routes name; they are served whatever the policy says."""
    wanted: bool = True
    """False from an unload to a load."""
    failed: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Version -> why it could not be loaded, and when."""
    withheld: Mapping[str, str] = field(default_factory=dict)
    """Version -> why it must not be served; replaced as a whole."""
    loading: str = ""
    unloaded: frozenset[str] = frozenset()
    """Versions that were unloaded one by one, until a load."""
    only: str | None = None
    """The version that is served instead of those of the policy, after a rollback."""


class Repository:
    """All models of a server. Thread-safe.

    Example: `with repository.lease("ads") as loaded:` runs a request on the newest version of "ads"; a hot
    swap meanwhile closes that version only after the block.

    Args:
        folders: The models to serve, each with its name.
        catalog: Lists and loads versions.
        batcher: Makes the batcher of a loaded version of the named model, which counts its batches.
        attach: Called with the name of the model and each version before it is warmed up, so that it follows
            a trainer.
        pinned: Model -> versions that are served whatever the policy says.
        clock: Seconds.
    """

    def __init__(
        self,
        folders: Sequence[ServedFolder],
        catalog: ServableCatalog,
        batcher: Callable[[str, Predictor, VersionStatistics], RequestBatcher],
        *,
        attach: Callable[[str, Predictor], None] | None = None,
        pinned: Mapping[str, frozenset[str]] | None = None,
        clock: Callable[[], float],
    ) -> None:
        named = pinned or {}
        self._folders = {one.name: _Folder(one, named.get(one.name, frozenset())) for one in folders}
        self._catalog = catalog
        self._batcher = batcher
        self._attach = attach
        self._clock = clock
        # One thread loads and unloads at a time. Requests never take this lock: they read `_serving`.
        self._changing = concurrency.RLock()
        self._serving: dict[str, dict[str, LoadedVersion]] = {name: {} for name in self._folders}
        """Model -> version -> loaded version, oldest first. The inner dict is replaced, never changed, so
        that requests read it without a lock."""
        self.answers_here = True
        """Whether all loaded versions answer without waiting for another process; see `Predictor`."""
        self._retiring: list[LoadedVersion] = []
        """Retired versions, some of which requests still lease; replaced as a whole by `_serve`."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._folders)

    @contextmanager
    def lease(self, name: str, version: str = "") -> Iterator[LoadedVersion]:
        """Lease a version for the duration of a block: it is not closed before.

        Args:
            version: Empty leases the newest loaded version.

        Raises:
            UnknownModelError: The server has no such model or version.
            UnavailableError: The model has no version that can answer.
        """
        while True:  # a version that was retired between the two lines has a successor
            found = self._find(name, version)
            if found.acquire():
                break
        try:
            yield found
        finally:
            found.release()

    def versions(self, name: str) -> tuple[str, ...]:
        """Return the versions that can answer, oldest first."""
        self._folder(name)
        return tuple(self._serving[name])

    def is_ready(self, name: str, version: str = "") -> bool:
        serving = self._serving.get(name, {})
        return version in serving if version else bool(serving)

    @property
    def all_ready(self) -> bool:
        """Whether each model that was not unloaded has a version that can answer."""
        return all(self._serving[name] for name, folder in self._folders.items() if folder.wanted)

    def index(self) -> list[ModelStatus]:
        """Return the state of all versions: served, loading, failed and withheld."""
        lines: list[ModelStatus] = []
        for name, folder in self._folders.items():
            ready = self._serving[name]
            lines += [ModelStatus(name, version, "READY") for version in ready]
            if folder.loading:
                lines.append(ModelStatus(name, folder.loading, "LOADING"))
            lines += [
                ModelStatus(name, version, "UNAVAILABLE", reason)
                for version, (reason, _) in list(folder.failed.items())
                if version not in ready
            ]
            lines += [
                ModelStatus(name, version, "UNAVAILABLE", f"withheld: {reason}")
                for version, reason in folder.withheld.items()
                if version not in ready and version not in folder.failed
            ]
            lines += [ModelStatus(name, version, "UNAVAILABLE", "unloaded") for version in folder.unloaded]
            silent = not folder.failed and not folder.loading and not folder.withheld and not folder.unloaded
            if not ready and silent:
                why = "no complete version in its folder" if folder.wanted else "unloaded"
                lines.append(ModelStatus(name, "", "UNAVAILABLE", why))
        return lines

    def refresh(self) -> None:
        """Poll every folder: load new versions, and retire those that are no longer wanted."""
        for name in self._folders:
            with self._changing:
                if self._folders[name].wanted:
                    self._refresh_model(name)

    def load(self, name: str) -> None:
        """Load the versions that the policy wants, including those that failed or were unloaded.

        Raises:
            UnknownModelError: The server has no such model.
            UnavailableError: None of its versions could be loaded.
        """
        folder = self._folder(name)
        with self._changing:
            folder.wanted = True
            folder.unloaded = frozenset()
            folder.failed.clear()
            self._refresh_model(name)
            if not self._serving[name]:
                reasons = "; ".join(f"version {one}: {why}" for one, (why, _) in folder.failed.items())
                raise UnavailableError(
                    f"cannot load model {name!r}: "
                    + (reasons or f"no complete version in {folder.config.folder}")
                )

    def serve_only(self, name: str, version: str | None) -> None:
        """Serve only one version, after a rollback; None serves the versions of the policy again.

        The version is loaded again even if it is loaded already, so that it is served as exported, without
        the rows that deltas changed since.

        Raises:
            UnknownModelError: The server has no such model or version. Nothing changes.
            UnavailableError: The version could not be loaded. Nothing changes.
        """
        folder = self._folder(name)
        with self._changing:
            found = list(self._catalog.versions(folder.config.folder))
            if version is not None and version not in found:
                raise UnknownModelError(
                    f"model {name!r} has no version {version[:200]!r}; in {folder.config.folder} there are "
                    f"{', '.join(found) or 'none'}"
                )
            before, folder.only = folder.only, version
            self._note_withheld(folder, found)
            wanted = self._wanted(folder, found)
            made = {one: self._try_to_load(folder, one) for one in wanted}
            loaded = {one: model for one, model in made.items() if model is not None}
            if not loaded:
                folder.only = before
                reasons = "; ".join(f"version {one}: {why}" for one, (why, _) in folder.failed.items())
                raise UnavailableError(f"cannot load model {name!r}: {reasons or 'it has no version'}")
            self._serve(name, loaded)

    def pin(self, pinned: Mapping[str, frozenset[str]]) -> None:
        """Serve these versions whatever the policy says, and no others in addition to it.

        Raises:
            UnknownModelError: A model or version is not there. Nothing changes.
            UnavailableError: A version could not be loaded. Nothing changes.
        """
        for name in pinned:
            self._folder(name)
        with self._changing:
            before = {name: folder.pinned for name, folder in self._folders.items()}
            changed = [name for name in before if pinned.get(name, frozenset()) != before[name]]
            for name in changed:
                self._folders[name].pinned = pinned.get(name, frozenset())
                for version in self._folders[name].pinned:
                    self._folders[name].failed.pop(version, None)  # an operator asked for it: try again
                self._folders[name].unloaded -= self._folders[name].pinned
                self._refresh_model(name)
            for name in changed:
                for version in sorted(self._folders[name].pinned - self._serving[name].keys()):
                    why = self._folders[name].failed.get(version)
                    for each in changed:
                        self._folders[each].pinned = before[each]
                        self._refresh_model(each)
                    if why is not None:
                        raise UnavailableError(f"cannot load version {version} of model {name!r}: {why[0]}")
                    raise UnknownModelError(f"model {name!r} has no version {version[:200]!r} to serve")

    def unload(self, name: str, version: str = "") -> None:
        """Stop serving a model, or one version of it; requests in flight finish first.

        If the policy wants the newest versions, an older one takes the place of the unloaded version.

        Raises:
            UnknownModelError: The server has no such model, or serves no such version of it.
        """
        folder = self._folder(name)
        with self._changing:
            if version:
                self._find(name, version)
                folder.unloaded |= {version}
                self._serve(name, {one: made for one, made in self._serving[name].items() if one != version})
                self._refresh_model(name)
                return
            folder.wanted = False
            folder.unloaded = frozenset()
            folder.failed.clear()
            self._serve(name, {})

    def close(self) -> None:
        """Retire every version; each is closed when its last lease ends."""
        with self._changing:
            for name, folder in self._folders.items():
                folder.wanted = False
                self._serve(name, {})

    @property
    def retiring(self) -> int:
        """Number of retired versions that requests still lease. From any thread: it changes nothing."""
        return sum(one.is_leased for one in self._retiring)

    def _folder(self, name: str) -> _Folder:
        try:
            return self._folders[name]
        except KeyError:
            served = ", ".join(self._folders) or "none"
            raise UnknownModelError(f"this server has no model {name[:200]!r}; it has {served}") from None

    def _find(self, name: str, version: str) -> LoadedVersion:
        folder = self._folder(name)
        serving = self._serving[name]
        if not version:
            if serving:
                return next(reversed(serving.values()))
            why = "it was unloaded" if not folder.wanted else "no version of it is loaded"
            raise UnavailableError(f"model {name!r} cannot answer: {why}")
        try:
            return serving[version]
        except KeyError:
            raise UnknownModelError(
                f"model {name!r} has no version {version[:200]!r}; it has {', '.join(serving) or 'none'}"
            ) from None

    def _refresh_model(self, name: str) -> None:
        folder = self._folders[name]
        try:
            found = list(self._catalog.versions(folder.config.folder))
        except (MonolithError, OSError) as error:
            _log.warning("cannot list the versions of model %r: %s", name, error)
            return
        self._note_withheld(folder, found)
        wanted = self._wanted(folder, found)
        before = self._serving[name]
        loaded = {version: before[version] for version in wanted if version in before}
        new = [version for version in wanted if version not in before and self._may_try(folder, version)]
        for version in new:
            made = self._try_to_load(folder, version)
            if made is not None:
                loaded[version] = made
        folder.failed = {one: why for one, why in folder.failed.items() if one in found}
        folder.unloaded &= set(found)
        if not any(version in loaded for version in wanted):
            loaded = before  # an old version is better than none
        elif any(version in folder.failed for version in wanted):
            loaded = {**before, **loaded}  # and stays until all that are wanted can answer
        order = {version: place for place, version in enumerate(found)}
        self._serve(name, dict(sorted(loaded.items(), key=lambda item: order.get(item[0], -1))))

    def _wanted(self, folder: _Folder, found: list[str]) -> list[str]:
        if folder.only is not None:  # an operator named it, so it is served even if it is withheld
            return [one for one in found if one == folder.only and one not in folder.unloaded]
        gone = folder.withheld.keys() | folder.unloaded
        offered = [version for version in found if version not in gone]
        wanted = set(folder.config.policy.wanted(offered)) | folder.pinned
        return [version for version in offered if version in wanted]

    def _note_withheld(self, folder: _Folder, found: list[str]) -> None:
        """Read which versions are withheld, and log changes."""
        known, folder.withheld = folder.withheld, self._catalog.withheld(folder.config.folder, found)
        for version, reason in folder.withheld.items():
            if version not in known:
                _log.warning(
                    "model %r: version %s is withheld and not served: %s",
                    *(folder.config.name, version, reason),
                )
        for version in known:
            if version in found and version not in folder.withheld:
                _log.info("model %r: version %s is no longer withheld", folder.config.name, version)
        serving = self._serving[folder.config.name]
        none_left = bool(found) and all(one in folder.withheld for one in found)
        if serving and none_left and known.keys() != folder.withheld.keys() and folder.only is None:
            _log.error(
                "model %r: version %s is withheld, and there is no other version to serve; it still "
                "answers. Export a checkpoint from before the first bad step, or stop this server.",
                *(folder.config.name, ", ".join(serving)),
            )

    def _may_try(self, folder: _Folder, version: str) -> bool:
        failed = folder.failed.get(version)
        return failed is None or self._clock() - failed[1] >= RETRY_AFTER

    def _try_to_load(self, folder: _Folder, version: str) -> LoadedVersion | None:
        name = folder.config.name
        folder.loading = version
        try:
            model = self._catalog.load(folder.config.folder, version)
            try:
                if self._attach is not None:
                    self._attach(name, model)
                model.warm_up()
            except BaseException:
                model.close()
                raise
        except Exception as error:  # whatever is wrong with the new version, the old one still answers
            folder.failed[version] = (str(error) or type(error).__name__, self._clock())
            _log.error(
                "cannot load version %s of model %r: %s",
                *(version, name, error),
                exc_info=not isinstance(error, MonolithError),
            )
            return None
        finally:
            folder.loading = ""
        folder.failed.pop(version, None)
        _log.info("model %r: version %s is ready", name, version)
        statistics = VersionStatistics()
        return LoadedVersion(model, self._batcher(name, model, statistics), statistics)

    def _serve(self, name: str, versions: dict[str, LoadedVersion]) -> None:
        before = self._serving[name]
        # The hot swap. New requests find the new versions from here on; only then are the old ones retired,
        # so that a request always finds a version that can be leased.
        self._serving[name] = versions
        self.answers_here = all(
            one.model.answers_here for some in self._serving.values() for one in some.values()
        )
        for version, old in before.items():
            if versions.get(version) is not old:
                _log.info(
                    "model %r: version %s no longer answers; it is closed after its last request",
                    name,
                    version,
                )
                self._retiring = [*(one for one in self._retiring if one.is_leased), old]
                old.retire()
