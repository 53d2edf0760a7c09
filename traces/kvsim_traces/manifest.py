"""The manifest: what a trace says about itself, checked field by field."""

import importlib.metadata
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, Final

from kvsim_traces.errors import TraceError

FORMAT_VERSION: Final = 1
LIMIT: Final = 2**31
"""Integers in a manifest lie below this."""

MOST_HEADS: Final = 2**16
"""Bound on layers, heads and the head dimension: not every capture has numbers on disk that stand for them."""

_LEAST_FACTOR: Final = 2.0**-126
_MOST_FACTOR: Final = 2.0**127

ARRAY_NAMES: Final = (
    "tokens",
    "text",
    "text_ends",
    "attention",
    "scores",
    "row_sums",
    "queries",
    "keys",
    "values",
    "keys_pre",
    "prompt_queries",
    "prompt_mass",
    "kvzip_scores",
    "gates",
)
"""Every array a trace may hold; other names are refused."""

CAPTURES: Final[dict[str, tuple[str, ...]]] = {
    "heads": ("attention",),
    "scores": ("scores",),
    "qk": ("queries", "keys"),
    "qkv": ("queries", "keys", "values"),
}
"""The capture levels and the arrays each needs."""

_NEEDS: Final = (
    ("text", "text_ends"),
    ("text_ends", "text"),
    ("text", "tokens"),
    ("queries", "keys"),
    ("keys_pre", "keys"),
)

LAYER_TYPES: Final = ("full_attention", "sliding_attention", "chunked_attention")
SOURCES: Final = ("recorder", "import")


def package_version() -> str:
    """Return the installed version of kvsim, or ``unknown`` in a bare checkout."""
    try:
        return importlib.metadata.version("kvsim")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class _Checker:
    """Collects where a value came from, so that every error names the file and the field."""

    def __init__(self, where: str) -> None:
        self.where = where

    def fail(self, name: str, message: str) -> TraceError:
        return TraceError(f"{self.where}: {name}: {message}")

    def integer(self, name: str, value: object, low: int = 0, high: int = LIMIT) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value < high:
            raise self.fail(name, f"must be an integer from {low} to {high - 1}, got {_short(value)}")
        return value

    def boolean(self, name: str, value: object) -> bool:
        if not isinstance(value, bool):
            raise self.fail(name, f"must be true or false, got {_short(value)}")
        return value

    def string(self, name: str, value: object, valid: tuple[str, ...] = ()) -> str:
        if not isinstance(value, str):
            raise self.fail(name, f"must be a string, got {_short(value)}")
        if valid and value not in valid:
            raise self.fail(name, f"must be one of {', '.join(valid)}, got {_short(value)}")
        return value

    def number(self, name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(name, f"must be a number, got {_short(value)}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.fail(name, f"must be finite, got {_short(value)}")
        return number

    def mapping(self, name: str, value: object) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.fail(name, f"must be an object, got {_short(value)}")
        return value

    def sequence(self, name: str, value: object) -> list[Any]:
        if not isinstance(value, list | tuple):
            raise self.fail(name, f"must be a list, got {_short(value)}")
        return list(value)

    def optional(self, check: Callable[..., Any], name: str, value: object, *rest: Any) -> Any:
        return None if value is None else check(name, value, *rest)


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "a huge integer"
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True)
class LayerInfo:
    """What a trace says about one recorded layer.

    Attributes
    ----------
    type : str
        ``full_attention``, ``sliding_attention`` or ``chunked_attention``.
    eligible : bool
        Whether policies score and evict this layer (design: sliding layers are left alone by default).
    sliding_window : int or None
        Window of a sliding layer, or chunk size of a chunked one, in positions.
    scaling : float or None
        Factor on the dot products; ``1 / sqrt(head_dim)`` when None.
    softcap : float or None
        Logits are ``softcap * tanh(logits / softcap)`` when set.
    """

    type: str = "full_attention"
    eligible: bool = True
    sliding_window: int | None = None
    scaling: float | None = None
    softcap: float | None = None


def _layer(check: _Checker, name: str, value: object) -> LayerInfo:
    if isinstance(value, LayerInfo):
        value = vars(value)
    data = check.mapping(name, value)
    for key in ("type", "eligible"):
        if key not in data:
            raise check.fail(f"{name}.{key}", "is missing")
    layer = LayerInfo(
        type=check.string(f"{name}.type", data["type"], LAYER_TYPES),
        eligible=check.boolean(f"{name}.eligible", data["eligible"]),
        sliding_window=check.optional(check.integer, f"{name}.sliding_window", data.get("sliding_window"), 1),
        scaling=check.optional(check.number, f"{name}.scaling", data.get("scaling")),
        softcap=check.optional(check.number, f"{name}.softcap", data.get("softcap")),
    )
    if layer.type != "full_attention" and layer.sliding_window is None:
        raise check.fail(f"{name}.sliding_window", f"a {layer.type} layer needs one")
    if layer.softcap is not None and layer.softcap <= 0:
        raise check.fail(f"{name}.softcap", f"must be above 0, got {layer.softcap}")
    # Of float32 vectors and factors that float32 holds, no product overflows float64: computed rows are finite.
    for field_name in ("scaling", "softcap"):
        factor = getattr(layer, field_name)
        if factor and not _LEAST_FACTOR <= abs(factor) <= _MOST_FACTOR:
            span = f"{_LEAST_FACTOR:.2g} to {_MOST_FACTOR:.2g}"
            raise check.fail(f"{name}.{field_name}", f"must have a size of {span}, got {factor}")
    return layer


@dataclass
class Manifest:
    """What a trace says about itself; stored as the attribute ``kvsim`` of the trace's Zarr group.

    The symbols are those of the design: L0 prompt length, T decode steps, K recorded layers, H query heads, Hk KV
    heads, d head dim. `committed_steps` is the only truth about a trace's length.

    Attributes
    ----------
    capture : str
        ``heads``, ``scores``, ``qk`` or ``qkv``.
    prompt_length : int
        L0, at least 1.
    planned_steps : int
        Steps the recording was meant to have; equals `committed_steps` once `complete`.
    num_layers, num_heads, num_kv_heads : int
        K, H and Hk; H is a multiple of Hk.
    arrays : list of str
        The arrays stored, out of `ARRAY_NAMES`.
    head_dim : int or None
        d; needed with queries, keys or values.
    committed_steps : int
        Steps that are whole and on disk.
    complete : bool
        Whether the recording was closed.
    layers : list of LayerInfo
        One for each recorded layer; `TraceWriter` takes an empty list to mean full attention everywhere.
    sink_logits : bool
        Whether the model's softmax has a sink logit, so that rows sum to less than 1.
    source : str
        ``recorder`` or ``import``.
    model : dict or None
        ``name``, ``config``, ``config_hash``, ``weights_hash``.
    tokenizer : dict or None
        ``name``, ``hash``.
    vocab_size : int or None
        Number of token ids; tokens are checked against it when given.
    environment : dict
        ``torch``, ``transformers``, ``python``, ``device``, ``dtype``, ``attention``; may be empty.
    generation : dict
        ``mode`` (``generated``, ``forced`` or ``imported``), ``seed``, ``temperature``, ``suppress_eos``,
        ``eos_token_ids``, ``chat_template``.
    check : dict or None
        ``step``, ``max_abs_error``, ``max_abs_error_stored``, ``against``: the recorder's self-check.
    notes : list of str
        Remarks for people.
    format_version : int
        1.
    kvsim_version, created : str
        Who wrote the trace, and when (ISO 8601).
    gate : dict or None
        ``name`` and ``hash`` of the gate file that `gates` come from; left out of the JSON when None.
    extra : dict
        Keys this version does not know; kept as they are.
    """

    capture: str
    prompt_length: int
    planned_steps: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    arrays: list[str]
    head_dim: int | None = None
    committed_steps: int = 0
    complete: bool = False
    layers: list[LayerInfo] = field(default_factory=list)
    sink_logits: bool = False
    source: str = "recorder"
    model: dict[str, Any] | None = None
    tokenizer: dict[str, Any] | None = None
    vocab_size: int | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=lambda: dict(IMPORTED_GENERATION))
    check: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    format_version: int = FORMAT_VERSION
    kvsim_version: str = field(default_factory=package_version)
    created: str = field(default_factory=_now)
    gate: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def eligible_layers(self) -> tuple[int, ...]:
        """Indices of the layers that policies score and evict."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.eligible)

    def validate(self, where: str = "manifest") -> None:
        """Check every field and how they fit together.

        Parameters
        ----------
        where : str
            What to call the manifest's file in errors.

        Raises
        ------
        TraceError
            Naming the file and the field.
        """
        check = _Checker(where)
        if check.integer("format_version", self.format_version) != FORMAT_VERSION:
            raise check.fail("format_version", f"this reader knows {FORMAT_VERSION}, got {self.format_version}")
        check.string("kvsim_version", self.kvsim_version)
        check.string("created", self.created)
        check.string("capture", self.capture, tuple(CAPTURES))
        check.integer("prompt_length", self.prompt_length, 1)
        check.integer("planned_steps", self.planned_steps, 1)
        check.integer("committed_steps", self.committed_steps)
        check.boolean("complete", self.complete)
        if self.committed_steps > self.planned_steps:
            raise check.fail("committed_steps", f"{self.committed_steps} exceeds planned_steps {self.planned_steps}")
        if self.complete and self.committed_steps != self.planned_steps:
            want = f"{self.committed_steps}, the committed_steps of a complete trace"
            raise check.fail("planned_steps", f"must be {want}, got {self.planned_steps}")
        for name in ("num_layers", "num_heads", "num_kv_heads"):
            check.integer(name, getattr(self, name), 1, MOST_HEADS + 1)
        if self.num_heads % self.num_kv_heads:
            raise check.fail("num_heads", f"{self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        check.optional(check.integer, "head_dim", self.head_dim, 1, MOST_HEADS + 1)
        self._validate_layers(check)
        check.boolean("sink_logits", self.sink_logits)
        self._validate_arrays(check)
        check.string("source", self.source, SOURCES)
        _validate_provenance(check, self)
        check.mapping("extra", self.extra)

    def _validate_layers(self, check: _Checker) -> None:
        layers = check.sequence("layers", self.layers)
        if len(layers) != self.num_layers:
            raise check.fail("layers", f"lists {len(layers)} layers, num_layers is {self.num_layers}")
        self.layers = [_layer(check, f"layers[{index}]", layer) for index, layer in enumerate(layers)]

    def _validate_arrays(self, check: _Checker) -> None:
        arrays = check.sequence("arrays", self.arrays)
        for index, name in enumerate(arrays):
            check.string(f"arrays[{index}]", name, ARRAY_NAMES)
        if len(set(arrays)) != len(arrays):
            raise check.fail("arrays", "lists an array twice")
        for name in CAPTURES[self.capture]:
            if name not in arrays:
                raise check.fail("arrays", f"capture {self.capture} needs {name}")
        if self.capture != "heads" and "attention" in arrays:
            raise check.fail("capture", f"a trace with attention is a heads capture, got {self.capture}")
        for one, other in _NEEDS:
            if one in arrays and other not in arrays:
                raise check.fail("arrays", f"{one} needs {other}")
        needs_dim = {"queries", "keys", "values", "keys_pre", "prompt_queries"} & set(arrays)
        if needs_dim and self.head_dim is None:
            raise check.fail("head_dim", f"is needed with {', '.join(sorted(needs_dim))}")

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as plain JSON data, unknown keys included."""
        data = dict(self.extra)
        for item in fields(self):
            if item.name == "layers":
                data["layers"] = [dict(vars(layer)) for layer in self.layers]
            elif item.name != "extra" and (item.name != "gate" or self.gate is not None):
                data[item.name] = getattr(self, item.name)
        return data

    @classmethod
    def from_json(cls, data: object, where: str = "manifest") -> "Manifest":
        """Build a manifest from JSON data and check it.

        Parameters
        ----------
        data : object
            What the file holds.
        where : str
            What to call the file in errors.

        Raises
        ------
        TraceError
            Naming the file and the field that is missing or wrong.
        """
        check = _Checker(where)
        given = check.mapping("manifest", data)
        if check.integer("format_version", given.get("format_version", -1), -1) != FORMAT_VERSION:
            raise check.fail("format_version", f"this reader knows {FORMAT_VERSION}, got {given.get('format_version')}")
        names = [item.name for item in fields(cls) if item.name != "extra"]
        for name in names:
            if name not in given and name != "gate":
                raise check.fail(name, "is missing")
        manifest = cls(
            **{name: given[name] for name in names if name in given},
            extra={key: value for key, value in given.items() if key not in names},
        )
        manifest.validate(where)
        return manifest


IMPORTED_GENERATION: Final[dict[str, Any]] = {
    "mode": "imported",
    "seed": None,
    "temperature": 0.0,
    "suppress_eos": False,
    "eos_token_ids": [],
    "chat_template": False,
}
"""`Manifest.generation` of a trace that no recorder made."""


def _fields(check: _Checker, name: str, value: object, keys: tuple[str, ...]) -> dict[str, Any]:
    data = check.mapping(name, value)
    for key in keys:
        if key not in data:
            raise check.fail(f"{name}.{key}", "is missing")
    return data


def _validate_provenance(check: _Checker, manifest: Manifest) -> None:
    if manifest.model is not None:
        model = _fields(check, "model", manifest.model, ("name", "config", "config_hash", "weights_hash"))
        check.string("model.name", model["name"])
        check.mapping("model.config", model["config"])
        for key in ("config_hash", "weights_hash"):
            check.optional(check.string, f"model.{key}", model[key])
    if manifest.tokenizer is not None:
        tokenizer = _fields(check, "tokenizer", manifest.tokenizer, ("name", "hash"))
        check.string("tokenizer.name", tokenizer["name"])
        check.optional(check.string, "tokenizer.hash", tokenizer["hash"])
    check.optional(check.integer, "vocab_size", manifest.vocab_size, 1)
    for key, value in check.mapping("environment", manifest.environment).items():
        check.optional(check.string, f"environment.{key}", value)
    if manifest.gate is not None:
        gate = _fields(check, "gate", manifest.gate, ("name", "hash"))
        check.string("gate.name", gate["name"])
        check.string("gate.hash", gate["hash"])
        if "gates" not in manifest.arrays:
            raise check.fail("gate", "is superfluous without the array gates")
    generation = _fields(check, "generation", manifest.generation, tuple(IMPORTED_GENERATION))
    check.string("generation.mode", generation["mode"], ("generated", "forced", "imported"))
    check.optional(check.integer, "generation.seed", generation["seed"], -(2**63), 2**64)
    check.number("generation.temperature", generation["temperature"])
    check.boolean("generation.suppress_eos", generation["suppress_eos"])
    check.boolean("generation.chat_template", generation["chat_template"])
    for index, token in enumerate(check.sequence("generation.eos_token_ids", generation["eos_token_ids"])):
        check.integer(f"generation.eos_token_ids[{index}]", token)
    if manifest.check is not None:
        result = _fields(check, "check", manifest.check, ("step", "max_abs_error", "max_abs_error_stored", "against"))
        check.integer("check.step", result["step"])
        for key in ("max_abs_error", "max_abs_error_stored"):
            check.number(f"check.{key}", result[key])
        check.string("check.against", result["against"])
    for index, note in enumerate(check.sequence("notes", manifest.notes)):
        check.string(f"notes[{index}]", note)
