"""Where every result is kept: one database, SQLite by default, any that SQLAlchemy speaks to for a team.

Four tables: `runs` (one call of a command), `gates`, `measurements` (raw samples included), `ceilings`. A row is
committed when it is finished and never changed, only a run's status is, so a process that is killed loses nothing that
was done. Ids are shown with a letter: `r3` a run, `g12` a gate, `m47` a measurement.
"""

from __future__ import annotations

import datetime
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DatabaseError, OperationalError, SQLAlchemyError

from workbench.errors import UsageError
from workbench.record import Measurement, Status

SCHEMA = 1
"""Version of the tables; a store of another version is refused with a sentence, never read wrongly."""

DEFAULT = "sqlite:///.workbench/store.db"
VARIABLE = "WORKBENCH_STORE"

_metadata = sa.MetaData()
_meta = sa.Table("workbench", _metadata, sa.Column("schema", sa.Integer, nullable=False))
_runs = sa.Table(
    "runs",
    _metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("started", sa.String(32), nullable=False),
    sa.Column("finished", sa.String(32)),
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("command", sa.Text, nullable=False),
    sa.Column("request", sa.String(64), nullable=False, index=True),
    sa.Column("fingerprint_key", sa.String(32), nullable=False),
    sa.Column("machine", sa.JSON, nullable=False),
    sa.Column("sources", sa.String(32), nullable=False),
    sa.Column("revision", sa.String(128)),
)
_gates = sa.Table(
    "gates",
    _metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("run", sa.Integer, sa.ForeignKey("runs.id"), nullable=False, index=True),
    sa.Column("created", sa.String(32), nullable=False),
    sa.Column("op", sa.String(64), nullable=False),
    sa.Column("label", sa.String(255), nullable=False),
    sa.Column("workload", sa.Text, nullable=False),
    sa.Column("source_hash", sa.String(32)),
    sa.Column("passed", sa.Boolean, nullable=False),
    sa.Column("status", sa.String(32), nullable=False),
    sa.Column("reason", sa.Text),
    sa.Column("record", sa.JSON, nullable=False),
)
_measurements = sa.Table(
    "measurements",
    _metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("run", sa.Integer, sa.ForeignKey("runs.id"), nullable=False, index=True),
    sa.Column("created", sa.String(32), nullable=False),
    sa.Column("op", sa.String(64), nullable=False, index=True),
    sa.Column("variant", sa.String(128), nullable=False),
    sa.Column("label", sa.String(255), nullable=False),
    sa.Column("workload", sa.Text, nullable=False),
    sa.Column("status", sa.String(32), nullable=False),
    sa.Column("latency_us", sa.Float),
    sa.Column("fingerprint_key", sa.String(32), nullable=False),
    sa.Column("protocol", sa.Integer, nullable=False),
    sa.Column("source_hash", sa.String(32)),
    sa.Column("revision", sa.String(128)),
    sa.Column("final", sa.Boolean, nullable=False),
    sa.Column("record", sa.JSON, nullable=False),
)
_ceilings = sa.Table(
    "ceilings",
    _metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("created", sa.String(32), nullable=False),
    sa.Column("fingerprint_key", sa.String(32), nullable=False, index=True),
    sa.Column("record", sa.JSON, nullable=False),
)


class Row(dict[str, Any]):
    """A row by column name."""

    @property
    def measurement(self) -> Measurement:
        """The record of a row of `measurements`."""
        return Measurement.from_json(self["record"])


def place(given: str | None) -> str:
    """The database's URL: `store=`, else $WORKBENCH_STORE, else `.workbench/store.db` of the current folder.

    A path stands for a SQLite file.
    """
    url = given or os.environ.get(VARIABLE) or DEFAULT
    return url if "://" in url else f"sqlite:///{url}"


class Store:
    """An open store. Use as a context, or call `close`."""

    def __init__(self, url: str | None = None, *, create: bool = True) -> None:
        """Open the store at `url` (see `place`), making it where there is none and `create` says so.

        Raises UsageError if it can't be opened, can't be written, or is of another schema version.
        """
        self.url = place(url)
        self.shown = re.sub(r"//[^/@]*@", "//…@", self.url)
        try:
            self._prepare_folder(create)
            self._engine = sa.create_engine(self.url, connect_args=self._arguments())
            if self.url.startswith("sqlite"):
                sa.event.listen(self._engine, "connect", _configure_sqlite)
            self._check_schema(create)
        except (SQLAlchemyError, OSError, ImportError) as fault:
            raise self._unusable(fault) from None

    def _unusable(self, fault: BaseException | None) -> UsageError:
        cause = str(getattr(fault, "orig", None) or fault).splitlines()[0]
        from workbench.registry import install_command  # brings torch, which reading a store does without

        driver = fault.name if isinstance(fault, ModuleNotFoundError) else None
        remedy = f"{install_command(driver)}, or name" if driver else "name"
        return UsageError(f"store={self.shown} can't be used: {cause}; {remedy} another with store=PATH")

    def _prepare_folder(self, create: bool) -> None:
        if not self.url.startswith("sqlite:///"):
            return
        path = Path(self.url[len("sqlite:///") :].partition("?")[0])
        if not path.exists() and not create:
            raise UsageError(f"there is no store at {path}; `workbench bench op=…` makes one")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(f"{path} is not writable")
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(f"the folder {path.parent} is not writable")

    def _arguments(self) -> dict[str, Any]:
        return {"timeout": 30} if self.url.startswith("sqlite") else {}

    def _check_schema(self, create: bool) -> None:
        if not sa.inspect(self._engine).has_table(_meta.name):
            if sa.inspect(self._engine).has_table("runs"):
                raise UsageError(f"{self.shown} holds other tables named like ours; name another with store=PATH")
            _metadata.create_all(self._engine)
        with self._engine.begin() as connection:
            found = connection.execute(sa.select(_meta.c.schema)).scalar()
            if found is None:
                connection.execute(_meta.insert().values(schema=SCHEMA))
            elif found != SCHEMA:
                raise UsageError(
                    f"{self.shown} has schema {found}, this workbench writes {SCHEMA};"
                    " keep it for the workbench that wrote it and name another with store=PATH"
                )

    def __enter__(self) -> Store:
        """The store itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, trace: object) -> None:
        """Close it. UsageError in place of what a database says that is broken, full or gone."""
        self.close()
        if isinstance(fault, OperationalError) or kind is DatabaseError:
            raise self._unusable(fault) from fault

    def close(self) -> None:
        """Give the connections back."""
        self._engine.dispose()

    # Runs.

    def start_run(
        self, command: str, request: str, machine: Mapping[str, Any], key: str, sources: str, revision: str | None
    ) -> str:
        """Note a new run; its id."""
        values = {
            "started": _now(),
            "status": "running",
            "command": command,
            "request": request,
            "fingerprint_key": key,
            "machine": dict(machine),
            "sources": sources,
            "revision": revision,
        }
        return f"r{self._insert(_runs, values)}"

    def unfinished_run(self, request: str, key: str, sources: str) -> Row | None:
        """The latest run of this very request, machine and sources, if it was not finished."""
        query = (
            sa.select(_runs)
            .where(_runs.c.request == request, _runs.c.fingerprint_key == key, _runs.c.sources == sources)
            .order_by(_runs.c.id.desc())
            .limit(1)
        )
        rows = self._rows("r", query)
        return rows[0] if rows and rows[0]["status"] != "finished" else None

    def end_run(self, run: str, status: str) -> None:
        """Note how a run ended: `finished`, `interrupted`; `running` when it goes on."""
        with self._engine.begin() as connection:
            ended = None if status == "running" else _now()
            connection.execute(_runs.update().where(_runs.c.id == _number(run)).values(status=status, finished=ended))

    def runs(self) -> list[Row]:
        """All runs, the latest first."""
        return self._rows("r", sa.select(_runs).order_by(_runs.c.id.desc()))

    # Gates.

    def add_gate(
        self,
        run: str,
        op: str,
        label: str,
        workload: str,
        source_hash: str | None,
        status: Status,
        reason: str | None,
        record: Mapping[str, Any],
    ) -> str:
        """Keep the outcome of a gate; its id."""
        values = {
            "run": _number(run),
            "created": _now(),
            "op": op,
            "label": label,
            "workload": workload,
            "source_hash": source_hash,
            "passed": status is Status.OK,
            "status": status.value,
            "reason": reason,
            "record": dict(record),
        }
        return f"g{self._insert(_gates, values)}"

    def gates(self, run: str) -> list[Row]:
        """The gates of a run, in order."""
        return self._rows("g", sa.select(_gates).where(_gates.c.run == _number(run)).order_by(_gates.c.id))

    # Measurements.

    def add_measurements(
        self, run: str, records: Iterable[Measurement], *, revision: str | None, final: bool = True
    ) -> list[str]:
        """Keep the measurements of one race, all or none; their ids. `final` is False where the race was stopped."""
        ids = []
        with self._engine.begin() as connection:
            for record in records:
                values = {
                    "run": _number(run),
                    "created": _now(),
                    "op": record.op,
                    "variant": record.variant,
                    "label": record.label,
                    "workload": record.workload,
                    "status": record.status.value,
                    "latency_us": record.latency_us,
                    "fingerprint_key": record.fingerprint_key,
                    "protocol": record.protocol,
                    "source_hash": record.source_hash,
                    "revision": revision,
                    "final": final,
                    "record": record.to_json(),
                }
                ids.append(f"m{_key(connection.execute(_measurements.insert().values(values)))}")
        return ids

    def measurements(self, *, run: str | None = None, op: str | None = None, final: bool | None = True) -> list[Row]:
        """Measurements of a run or an op, in order; with `final=None` those of stopped races too."""
        query = sa.select(_measurements).order_by(_measurements.c.id)
        if run is not None:
            query = query.where(_measurements.c.run == _number(run))
        if op is not None:
            query = query.where(_measurements.c.op == op)
        if final is not None:
            query = query.where(_measurements.c.final == final)
        return self._rows("m", query)

    # Ceilings.

    def add_ceilings(self, key: str, record: Mapping[str, Any]) -> None:
        """Keep what a machine can do."""
        self._insert(_ceilings, {"created": _now(), "fingerprint_key": key, "record": dict(record)})

    def ceilings(self, key: str) -> dict[str, Any] | None:
        """The latest ceilings of a machine."""
        query = sa.select(_ceilings).where(_ceilings.c.fingerprint_key == key).order_by(_ceilings.c.id.desc()).limit(1)
        rows = self._rows("c", query)
        return dict(rows[0]["record"]) if rows else None

    # Anything by its id.

    def get(self, name: str) -> tuple[str, Row]:
        """What `m47`, `g12`, `r3` or a bare `47` (a measurement) names, with the word for it.

        Raises UsageError if there is nothing of that id.
        """
        match = re.fullmatch(r"([mgr]?)(\d+)", name.strip())
        if match is None:
            raise UsageError(f"{name!r} is no id; ids look like m47 (a measurement), g12 (a gate), r3 (a run)")
        letter = match[1] or "m"
        word, table = {"m": ("measurement", _measurements), "g": ("gate", _gates), "r": ("run", _runs)}[letter]
        rows = self._rows(letter, sa.select(table).where(table.c.id == int(match[2])))
        if not rows:
            with self._engine.connect() as connection:
                count = connection.execute(sa.select(sa.func.max(table.c.id))).scalar()
            known = f"the latest is {letter}{count}" if count else f"it holds no {word} yet"
            raise UsageError(f"{self.shown} has no {word} {letter}{match[2]}; {known}")
        return word, rows[0]

    def _insert(self, table: sa.Table, values: Mapping[str, Any]) -> int:
        with self._engine.begin() as connection:
            return _key(connection.execute(table.insert().values(values)))

    def _rows(self, letter: str, query: sa.Select[Any]) -> list[Row]:
        with self._engine.connect() as connection:
            found = [Row(row) for row in connection.execute(query).mappings()]
        for row in found:
            row["id"] = f"{letter}{row['id']}"
            if "run" in row:
                row["run"] = f"r{row['run']}"
            if isinstance(row.get("record"), str):  # a driver without a JSON type
                row["record"] = json.loads(row["record"])
        return found


def _configure_sqlite(connection: Any, _: Any) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")  # readers and a writer side by side; a kill leaves it sound
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _key(result: sa.CursorResult[Any]) -> int:
    """Primary key of the row just inserted."""
    assert result.inserted_primary_key is not None
    return int(result.inserted_primary_key[0])


def _number(name: str) -> int:
    return int(name[1:])


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
