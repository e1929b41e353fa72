"""How many parameter servers a table needs: arithmetic, from what a row takes and what work costs.

    Wish, ServerCosts -> make_plan -> ClusterPlan
      row       bytes of a row, by the table's own layout
      load      steps and rows per second
      servers   for each storage: how many servers each resource asks for, and what one of them is

Every figure says how it was computed. A server is one process with a machine of its own. What is assumed: ids
of a table are drawn by one Zipf distribution and spread evenly over servers; each step of a worker asks every
server twice, once for rows and once with gradients, and Python holds that work to one core
(docs/scale.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from monolith import native
from monolith.errors import ConfigError
from monolith.observe.progress import describe_bytes
from monolith.table import NativeTable, TableConfig
from monolith.table.config import TableStorage
from monolith.table.shard_files import RowLayout, saved_row_bytes
from monolith.table.tiered_table import tier_sizes

INDEX_BYTES = 29
"""Memory of a row's place in the index of a table in memory, and what arrays of it waste. Measured: 28 to 30
with 3 to 40 M rows, 25 to 37 below that."""
WIRE_ID_BYTES = 8
WIRE_VALUE_BYTES = 4
"""Embeddings and gradients travel as float32, however they are stored."""
SAVING_THREADS = 4
"""Files that a server writes or reads at once, as `dump` and `load` do by default."""
REWRITTEN = 2
"""How often a cold row is written, and how many times its bytes its files take: a file is compacted when half
of its rows are dead."""
COLD_HEAD_BYTES = 16
"""Of a row in a file: its part of the file's directory, which saving and restoring by links read."""
CLOCK_MISSES = 1.2
"""How much more often a row is not in memory than if the rows used most were there. Measured with 500,000
rows, a third of them hot: 1.2 with Zipf exponents of 0.8 and 1.05, 1.0 with uniform ids."""
MOST_TABLE_ROWS = 1 << 32
MOST_SERVERS = 10**7


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerCosts:
    """What work costs on one machine. The defaults were measured, as `source` says."""

    request: float = 1.198e-3
    """Processor seconds of a server for one step of a worker, before the first row: a lookup and a push."""
    row: float = 172e-9
    """Processor seconds to look up a row and to update it."""
    table_row: float = 106e-9
    """The part of `row` that is the table's own work."""
    cold_row: float = 5e-6
    """The same of a row in a file, in addition."""
    save_bytes_per_s: float = 258e6
    """Of one core."""
    restore_bytes_per_s: float = 452e6
    disk_reads_per_s: float = 32_000
    """Random reads of a block of 4 KiB."""
    disk_bytes_per_s: float = 1.2e9
    """Written to the disk, or read from it, one after the other; of checkpoints, too."""
    source: str = (
        "requests, rows and saving: `monolith bench scale` on a Neoverse N1, 16 floats with Adagrad, see "
        "docs/scale.md; rows in files and disk: `monolith plan --measure` and `monolith doctor --disk` on "
        "two busy cores of a Xeon with a virtual disk"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What is to be trained, and on what."""

    rows: int
    config: TableConfig
    """A row: its embedding, how it is stored, and its optimizer."""
    examples_per_s: float
    ids_per_example: float
    batch: int
    zipf: float
    """Exponent of the distribution of ids; 0 is uniform."""
    hit_rate: float | None
    """The share of lookups and updates that read no file, as a run counts them; None computes it."""
    memory: int
    """Bytes of a server."""
    headroom: float
    """The share of memory, core, disk and network that stays free."""
    network: float
    """Bytes per second of a server, in each direction."""
    standbys: int
    checkpoint_every: float
    """Seconds."""
    storages: tuple[TableStorage, ...]


@dataclass(frozen=True, slots=True)
class Figure:
    """A number, and how it came about."""

    name: str
    value: float
    unit: str
    how: str = ""

    def __str__(self) -> str:
        forms: dict[str, Callable[[float], str]] = {
            "bytes": size,
            "bytes/s": lambda value: f"{size(value)}/s",
            "seconds": span,
            "share": lambda value: f"{value:.3g}" if value > 1 else f"{value:.1%}",
            "bytes of a row": lambda value: f"{value:g} B",
        }
        form = forms.get(self.unit)
        return form(self.value) if form else f"{count(self.value)} {self.unit}"


@dataclass(frozen=True, slots=True)
class Servers:
    """The servers of one storage."""

    storage: TableStorage
    servers: int
    """Without standbys."""
    processes: int
    """With them."""
    binding: str
    """The bound that asks for the most servers."""
    bounds: tuple[Figure, ...]
    each: tuple[Figure, ...]
    """One server: what it needs and how busy it is; and how long it saves and restores."""


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    row: tuple[Figure, ...]
    load: tuple[Figure, ...]
    servers: tuple[Servers, ...]


# Numbers for people


def count(value: float) -> str:
    """488, 11.9 M, 1e10."""
    if value >= 999.5e6:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    if value >= 999_500:
        return f"{value / 1e6:.3g} M"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def size(value: float) -> str:
    """2.88 TB, in powers of 1000, as disks and networks are sold."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} PB"


def span(seconds: float) -> str:
    """172 ns, 1.2 ms, 42 s, 12 min, 3 h, 4 days."""
    units = {"days": 86_400.0, "h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
    for unit, length in units.items():
        if seconds >= length * (2 if length > 1 else 1):
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


# What a row takes


@dataclass(frozen=True, slots=True)
class RowBytes:
    """Bytes of a row."""

    values: int
    state: int
    padding: int
    saved: int
    """In a checkpoint."""

    @classmethod
    def of(cls, config: TableConfig) -> RowBytes:
        """Ask a table with this config how it stores a row."""
        table = NativeTable(config)
        stored = table.core.row_bytes
        table.close()
        values, state = config.embedding_bytes, 4 * config.state_dim
        return cls(values, state, stored - values - state, saved_row_bytes(RowLayout.of(config)))

    @property
    def stored(self) -> int:
        """As the table keeps it, without its place in an index."""
        return self.values + self.state + self.padding

    @property
    def in_memory(self) -> int:
        return self.stored + INDEX_BYTES


# How ids are distributed


class Popularity:
    """Rows in the order of their use, by a Zipf distribution: the k-th is drawn k**-exponent as often.

    The first rows count one by one, all later ones in groups, so that any number of rows takes
    thousands of numbers.
    """

    _SINGLE = 1024
    _GROUPS = 4096

    def __init__(self, rows: int, exponent: float) -> None:
        single = np.arange(min(rows, self._SINGLE) + 1, dtype=np.float64)
        edges = np.geomspace(single[-1], rows, self._GROUPS + 1)[1:] if rows > self._SINGLE else single[:0]
        ends = np.concatenate([single, edges])
        self._begins = ends[:-1]
        self._counts = np.diff(ends)
        # The sum over a group, as the integral from half a rank before it to half a rank behind.
        low, high = ends[:-1] + 0.5, ends[1:] + 0.5
        if exponent == 1:
            weight = np.log(high / low)
        else:
            weight = (high ** (1 - exponent) - low ** (1 - exponent)) / (1 - exponent)
        weight[: len(single) - 1] = single[1:] ** -exponent
        self._chance = weight / weight.sum() / self._counts

    def distinct(self, draws: float, among: float = math.inf) -> float:
        """Return how many distinct rows so many draws have, on average, among the most frequent ones."""
        counts = np.clip(among - self._begins, 0, self._counts)
        return float((counts * -np.expm1(-draws * self._chance)).sum())


# The plan


def make_plan(wish: Wish, costs: ServerCosts) -> ClusterPlan:
    """Compute everything.

    Raises:
        ConfigError: No number of servers is enough.
    """
    row = RowBytes.of(wish.config)
    sums = _Sums(wish, costs, row)
    return ClusterPlan(
        row=tuple(_row_figures(wish, row)),
        load=tuple(sums.load()),
        servers=tuple(sums.servers(storage) for storage in wish.storages),
    )


def _row_figures(wish: Wish, row: RowBytes) -> list[Figure]:
    config, unit = wish.config, "bytes of a row"
    floats = config.dim + config.state_dim
    found = [
        Figure("values", row.values, unit, f"{config.dim} x {config.embedding_bytes / config.dim:g} B"),
        Figure("state", row.state, unit, f"{config.state_dim} x 4 B"),
        Figure("padding", row.padding, unit, "to a multiple of 16 B"),
        Figure("index", INDEX_BYTES, unit, "ID, event time and place, with free slots; measured"),
        Figure("in memory", row.in_memory, unit, f"{row.stored} B + {INDEX_BYTES} B"),
        Figure("in a checkpoint", row.saved, unit, f"{row.saved - 4 * floats} B + {floats} x 4 B"),
    ]
    if "tiered" in wish.storages:
        file = tier_sizes(row.stored, wish.memory, 0)
        head = f"{file.record_bytes - row.stored} B head + {row.stored} B"
        how = f"{head}, in blocks of {file.block_bytes:,} B, with a directory"
        found.append(Figure("in a file", round(file.file_bytes, 1), unit, how))
    return found


class _Sums:
    """The arithmetic of one wish."""

    def __init__(self, wish: Wish, costs: ServerCosts, row: RowBytes) -> None:
        self._wish, self._costs, self._row = wish, costs, row
        self._use = 1 - wish.headroom
        self._steps = wish.examples_per_s / wish.batch
        self._draws = wish.batch * wish.ids_per_example
        self._popularity = Popularity(wish.rows, wish.zipf)
        self._distinct = self._popularity.distinct(self._draws)
        self._rows_per_s = self._steps * self._distinct

    def load(self) -> list[Figure]:
        wish = self._wish
        steps = f"{count(wish.examples_per_s)} examples/s / {count(wish.batch)}"
        drawn = f"{count(wish.batch)} x {wish.ids_per_example:g} = {count(self._draws)} drawn"
        return [
            Figure("steps", self._steps, "steps/s", steps),
            Figure(
                "rows of a step", self._distinct, "rows", f"{drawn} by Zipf({wish.zipf:g}), distinct ones"
            ),
            Figure(
                "rows", self._rows_per_s, "rows/s", f"{count(self._steps)} steps/s x {count(self._distinct)}"
            ),
        ]

    def servers(self, storage: TableStorage) -> Servers:
        cold = storage == "tiered"
        bounds = [self._of_index() if cold else self._of_memory(), self._of_processor(), self._of_network()]
        if cold:
            bounds += [self._of_cold_rows(), self._of_disk_reads(), self._of_disk_writes()]
        bounds.append(self._of_checkpoints(cold))
        binding = max(bounds, key=lambda bound: bound.value)
        servers = int(binding.value)
        return Servers(
            storage,
            servers,
            servers * (1 + self._wish.standbys),
            binding.name,
            tuple(bounds),
            tuple(self._each(servers, cold)),
        )

    # What each resource asks for

    def _of_memory(self) -> Figure:
        wish, row = self._wish, self._row
        total = wish.rows * row.in_memory
        how = f"{count(wish.rows)} rows x {row.in_memory} B = {size(total)}; / {self._part_of_memory}"
        servers = total / (self._use * wish.memory)
        if servers < wish.rows / MOST_TABLE_ROWS:
            servers, how = wish.rows / MOST_TABLE_ROWS, f"{count(wish.rows)} rows; / 2^32 of one table"
        return _bound("memory", servers, how)

    def _of_index(self) -> Figure:
        """Of a tiered table: the index of cold rows may take half of its memory, or little is hot."""
        wish = self._wish
        servers = _least(lambda servers: self._tiers(servers).index_bytes <= self._use * wish.memory / 2)
        index = self._tiers(servers).index_bytes * servers
        how = f"{size(index)} of index for rows in files; / half of {self._part_of_memory}"
        return _bound("memory", servers, how)

    @property
    def _part_of_memory(self) -> str:
        return f"({self._use:g} x {describe_bytes(self._wish.memory)})"

    def _of_processor(self) -> Figure:
        costs, use = self._costs, self._use
        requests = self._steps * costs.request
        asked = f"{count(self._steps)} steps/s x {span(costs.request)} = {requests:.3g} of a core"
        if requests >= use:
            batch = math.ceil(2 * self._wish.examples_per_s * costs.request / use)
            raise ConfigError(
                f"plan: a step asks every server, and {asked}, more than the {use:g} that --headroom leaves "
                f"of it, however many servers there are. With --batch {batch} half of that is left for rows"
            )
        work = self._rows_per_s * costs.row
        how = (
            f"{count(self._rows_per_s)} rows/s x {span(costs.row)} = {work:.3g} cores; / ({use:g} - {asked})"
        )
        return _bound("processor", work / (use - requests), how)

    def _of_network(self) -> Figure:
        wish = self._wish
        how = (
            f"{count(self._rows_per_s)} rows/s x (2 x {WIRE_ID_BYTES} B + {wish.config.dim} x "
            f"{WIRE_VALUE_BYTES} B) = {size(self._received)}/s; / ({self._use:g} x {size(wish.network)}/s)"
        )
        return _bound("network", self._received / (self._use * wish.network), how)

    @property
    def _received(self) -> float:
        """Bytes per second that all servers receive: IDs twice, and gradients. They send less."""
        return self._rows_per_s * (2 * WIRE_ID_BYTES + self._wish.config.dim * WIRE_VALUE_BYTES)

    def _of_cold_rows(self) -> Figure:
        cost = self._costs.cold_row
        return self._of_misses("processor, rows in files", cost, f"{span(cost)} of a core", 1.0, "1 core")

    def _of_disk_reads(self) -> Figure:
        limit = self._costs.disk_reads_per_s
        return self._of_misses("disk reads", self._reads, f"{self._reads}", limit, f"{count(limit)} reads/s")

    def _of_disk_writes(self) -> Figure:
        limit = self._costs.disk_bytes_per_s
        each = f"{REWRITTEN} x {self._file_bytes:.0f} B"
        return self._of_misses("disk writes", REWRITTEN * self._file_bytes, each, limit, f"{size(limit)}/s")

    def _of_misses(self, name: str, cost: float, each: str, limit: float, of: str) -> Figure:
        """Servers that are enough for rows that are not in memory. The more servers, the fewer such rows."""
        usable = self._use * limit
        servers = _least(lambda servers: self._misses(servers) * cost <= servers * usable)
        missed = self._misses(servers)
        how = (
            f"{count(self._rows_per_s)} rows/s x {1 - self._hit_rate(servers):.1%} not in the memory of "
            f"{servers:,} = {count(missed)} rows/s; x {each} / ({self._use:g} x {of})"
        )
        return _bound(name, servers, how)

    def _of_checkpoints(self, cold: bool) -> Figure:
        every, rate = self._wish.checkpoint_every, self._costs.save_bytes_per_s
        if cold:  # rows that are hot are written: the more servers, the more of them
            servers = _least(lambda servers: self._copying(servers, rate, cold)[0] <= every)
            seconds, how = self._copying(servers, rate, cold)
            which = "one server" if servers == 1 else f"each of {servers:,} servers"
            return _bound("checkpoints", servers, f"{how} = {span(seconds)} of {which}; within {span(every)}")
        seconds, how = self._copying(1, rate, cold)
        return _bound(
            "checkpoints", seconds / every, f"{how} = {span(seconds)} of one server; / {span(every)}"
        )

    # One server

    def _each(self, servers: int, cold: bool) -> list[Figure]:
        wish, costs, row = self._wish, self._costs, self._row
        rows = wish.rows / servers
        found = [Figure("rows", rows, "rows", f"{count(wish.rows)} / {servers:,}")]
        if cold:
            found += self._each_tiered(servers)
        else:
            found.append(
                Figure("memory for rows", rows * row.in_memory, "bytes", f"{count(rows)} x {row.in_memory} B")
            )
        requests, share = self._steps * costs.request, self._rows_per_s / servers
        core = f"{count(self._steps)} x {span(costs.request)} + {count(share)} rows/s x {span(costs.row)}"
        saving, how_saving = self._copying(servers, costs.save_bytes_per_s, cold)
        restoring, how_restoring = self._copying(servers, costs.restore_bytes_per_s, cold)
        saved: float = wish.rows * row.saved
        how_much = f"{count(wish.rows)} x {row.saved} B, of all servers"
        if cold:
            hot = min(servers * self._tiers(servers).hot_rows, wish.rows)
            linked = REWRITTEN * (wish.rows - hot) * self._file_bytes
            saved = hot * row.saved + linked
            how_much = f"{count(hot)} x {row.saved} B, and links to {size(linked)} of files, of all servers"
        return [
            *found,
            Figure("core", requests + share * costs.row, "share", core),
            Figure("network", self._received / servers, "bytes/s", "received"),
            Figure("a checkpoint", saved, "bytes", how_much),
            Figure("is saved in", saving, "seconds", how_saving),
            Figure("is restored in", restoring, "seconds", how_restoring),
        ]

    def _each_tiered(self, servers: int) -> list[Figure]:
        tiers, rows = self._tiers(servers), math.ceil(self._wish.rows / servers)
        cold, missed = rows - tiers.hot_rows, self._misses(servers) / servers
        files = REWRITTEN * cold * self._file_bytes
        written = missed * REWRITTEN * self._file_bytes
        return [
            Figure(
                "rows in memory",
                tiers.hot_rows,
                "rows",
                f"{self._part_of_memory}, less index and buffers, / {tiers.hot_bytes} B",
            ),
            Figure("memory for the index", tiers.index_bytes, "bytes", f"of {count(cold)} rows in files"),
            Figure("found in memory", self._hit_rate(servers), "share", self._how_found),
            Figure("files", files, "bytes", f"{REWRITTEN} x {count(cold)} x {self._file_bytes:.0f} B"),
            Figure("disk reads", missed * self._reads, "reads/s", f"{count(missed)} rows/s x {self._reads}"),
            Figure(
                "disk writes",
                written,
                "bytes/s",
                f"{count(missed)} rows/s x {REWRITTEN} x {self._file_bytes:.0f} B",
            ),
            Figure(
                "core, rows in files",
                missed * self._costs.cold_row,
                "share",
                f"x {span(self._costs.cold_row)}",
            ),
        ]

    def _copying(self, servers: int, bytes_per_s: float, cold: bool) -> tuple[float, str]:
        """Seconds in which a server saves or restores its rows. Those in files are linked, which reads their
        directories."""
        disk, threads = self._costs.disk_bytes_per_s, SAVING_THREADS * bytes_per_s
        share = self._wish.rows / servers
        hot = min(self._tiers(servers).hot_rows, share) if cold else share
        rate, limit = threads, f"({SAVING_THREADS} threads x {size(bytes_per_s)}/s)"
        if disk < rate:
            rate, limit = disk, f"{size(disk)}/s of the disk"
        saved = hot * self._row.saved
        seconds, how = saved / rate, f"{size(saved)} / {limit}"
        if cold:
            heads = REWRITTEN * (share - hot) * COLD_HEAD_BYTES
            seconds += heads / disk
            how += f" + {size(heads)} of directories / {size(disk)}/s"
        return seconds, how

    # Rows in memory and in files

    def _tiers(self, servers: int) -> native.TierSizes:
        share = math.ceil(self._wish.rows / servers)
        return tier_sizes(self._row.stored, int(self._use * self._wish.memory), share)

    @property
    def _file_bytes(self) -> float:
        return tier_sizes(self._row.stored, self._wish.memory, 0).file_bytes

    @property
    def _reads(self) -> int:
        """Reads of 4 KiB that a row takes."""
        return tier_sizes(self._row.stored, self._wish.memory, 0).block_bytes // 4096

    def _hit_rate(self, servers: int) -> float:
        """The share of the rows of a step that are in memory."""
        hot = self._tiers(servers).hot_rows * servers
        if hot >= self._wish.rows:
            return 1.0
        if self._wish.hit_rate is not None:
            # A run counts a row of a step twice, for its lookup and its update, and reads it once.
            return max(1 - 2 * (1 - self._wish.hit_rate), 0.0)
        missed = 1 - self._popularity.distinct(self._draws, hot) / self._distinct
        return max(1 - CLOCK_MISSES * missed, 0.0)

    @property
    def _how_found(self) -> str:
        if self._wish.hit_rate is not None:
            return f"of the rows of a step: {self._wish.hit_rate:.1%} of lookups and updates read no file"
        return f"of the rows of a step, with {CLOCK_MISSES} x the misses of a perfect choice"

    def _misses(self, servers: int) -> float:
        """Rows per second, of all servers, that are not in memory."""
        return self._rows_per_s * (1 - self._hit_rate(servers))


def _bound(name: str, servers: float, how: str) -> Figure:
    return Figure(name, max(1, math.ceil(servers - 1e-9)), "servers", how)


def _least(enough: Callable[[int], bool]) -> int:
    """Return the smallest number of servers that is enough, where more are enough, too."""
    high = 1
    while not enough(high):
        high *= 2
        if high > MOST_SERVERS:
            raise ConfigError(
                f"plan: {MOST_SERVERS:,} servers are not enough; check the figures, --memory above all"
            )
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
