"""``danlu config show``."""

from __future__ import annotations

from danlu.cli.options import ConfigFile, Json, Overrides


def command(config: ConfigFile, overrides: Overrides = None, json: Json = False) -> None:
    """Print the resolved config of a training run and where each value came from."""
    from danlu.base.log import print_json, print_result
    from danlu.config.load import load
    from danlu.config.schema import Config

    loaded = load(Config, config, overrides or [])
    values = loaded.config.model_dump(mode="json")
    rows = [
        (f"{section}.{key}", value, loaded.origin(f"{section}.{key}"))
        for section, keys in values.items()
        for key, value in keys.items()
    ]
    if json:
        print_json({key: {"value": value, "origin": origin} for key, value, origin in rows})
        return
    width = max(len(key) for key, _, _ in rows)
    print_result("\n".join(f"{key:<{width}}  {_text(value):<24}  {origin}" for key, value, origin in rows))


def _text(value: object) -> str:
    return "unset" if value is None else str(value)
