"""The models that a process serves: names, aliases, and the engine behind each.

It receives settings and returns `Models`, which turn a name into a `Model`. It knows no requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from legato.catalog.pull import find_model
from legato.config import LimitSettings, ModelSettings, Settings, worker_environment
from legato.decoding.grammar_check import Checker
from legato.engines.base import Engine
from legato.engines.scripted import ScriptedEngine
from legato.errors import ConfigError, ModelNotFound, ModelNotPermitted
from legato.prompting.profiles import Profile
from legato.run.admission import Admission
from legato.types import Tags

__all__ = ["Model", "Models", "load_models", "model_path"]


@dataclass(frozen=True, slots=True)
class Model:
    """A served model."""

    name: str
    engine: Engine
    admission: Admission
    checker: Checker = field(default_factory=Checker)
    """May be that of other models as well."""


class Models:
    """All served models and the aliases for them. `hidden` are the models among them that a key may not use."""

    def __init__(
        self, models: Mapping[str, Model], aliases: Mapping[str, str], hidden: frozenset[str] = frozenset()
    ) -> None:
        self._models = dict(models)
        self._aliases = dict(aliases)
        self._hidden = hidden

    def only(self, names: Sequence[str]) -> Models:
        """Return those of these names and aliases; all if none is given."""
        if not names:
            return self
        shown = {self._aliases.get(name, name) for name in names}
        return Models(self._models, self._aliases, frozenset(self._models) - shown)

    @property
    def served(self) -> Mapping[str, Model]:
        """Every name that `resolve` takes, the models' own first."""
        own = {model.name: model for model in self.own}
        return {**own, **{alias: own[name] for alias, name in self._aliases.items() if name in own}}

    @property
    def own(self) -> tuple[Model, ...]:
        """Each model once."""
        return tuple(model for name, model in self._models.items() if name not in self._hidden)

    def resolve(self, name: str) -> Model:
        """Return the model of this name or alias; the first one if no name is given.

        Raises:
            ModelNotFound: there is none.
            ModelNotPermitted: it is hidden, or all are.
        """
        if not name and self.own:
            return self.own[0]
        model = self._models.get(self._aliases.get(name, name))
        if not name or (model is not None and model.name in self._hidden):
            may = f"may use {_list(self.served)}" if self.own else "may use none of those that are served"
            raise ModelNotPermitted(f"the key may not use the model `{name}`; it {may}", param="model")
        if model is None:
            raise ModelNotFound(f"the model `{name}` does not exist; served: {_list(self.served)}", param="model")
        return model

    async def aclose(self) -> None:
        """Close every engine, and what belongs to it."""
        for model in self._models.values():
            model.checker.close()
            await model.engine.aclose()


def _list(names: Mapping[str, object]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def model_path(name: str, settings: ModelSettings, data_dir: Path) -> Path:
    """Return the GGUF file of a model: the one configured, or the pulled one of that name.

    Raises:
        ConfigError: there is none.
    """
    if settings.path:
        return Path(settings.path)
    return find_model(name, data_dir)


async def load_models(settings: Settings) -> Models:
    """Start an engine for every configured model.

    Raises:
        ConfigError: a file is missing or no model, memory does not suffice, or an alias names nothing.
    """
    models: dict[str, Model] = {}
    checker = Checker()
    try:
        for name, model in settings.models.items():
            engine = await _start(name, model, settings.data_dir)
            models[name] = Model(name, engine, _admission(settings.limits), checker)
        return Models(models, settings.aliases)
    except BaseException:
        for started in models.values():
            await started.engine.aclose()
        raise


async def _start(name: str, settings: ModelSettings, data_dir: Path) -> Engine:
    if settings.engine == "scripted":
        scripted = ScriptedEngine()
        scripted.profile = _overridden(scripted.profile, settings)
        return scripted
    if settings.engine == "upstream":
        return await _upstream(settings)
    path = model_path(name, settings, data_dir)
    try:
        from legato.engines.llamacpp.engine import LlamaCppEngine
        from legato.engines.llamacpp.worker import WorkerSettings
    except ImportError:
        raise ConfigError("the embedded engine is not installed: `pip install 'legato[local]'`") from None
    worker = WorkerSettings(
        path=path,
        context_length=settings.context_length,
        num_cells=settings.num_cells,
        num_threads=settings.num_threads,
        spill_bytes=settings.spill_bytes,
        spill_dir=_spill_dir(name, settings),
    )
    engine = await LlamaCppEngine.start(worker, worker_environment())
    engine.profile = _overridden(engine.profile, settings)
    return engine


async def _upstream(settings: ModelSettings) -> Engine:
    try:
        from legato.engines.upstream.engine import UpstreamEngine

        engine = await UpstreamEngine.start(
            settings.urls,
            model=settings.upstream_model,
            key=settings.upstream_key,
            folder=Path(settings.tokenizer),
            context_length=settings.context_length,
            has_plugin=settings.upstream_plugin,
        )
    except ImportError:
        raise ConfigError("the engine `upstream` is not installed: `pip install 'legato[upstream]'`") from None
    engine.profile = _overridden(engine.profile, settings)
    return engine


def _overridden(profile: Profile, settings: ModelSettings) -> Profile:
    """Return a profile with what is configured in place of what the model says of itself."""
    if not settings.reasoning_open:
        return profile
    return replace(profile, reasoning=Tags(settings.reasoning_open, settings.reasoning_close))


def _spill_dir(name: str, settings: ModelSettings) -> Path | None:
    return Path(settings.spill_dir) / name if settings.spill_dir else None


def _admission(limits: LimitSettings) -> Admission:
    return Admission(max_running=limits.max_running, max_waiting=limits.max_waiting, max_wait_s=limits.max_wait_s)
