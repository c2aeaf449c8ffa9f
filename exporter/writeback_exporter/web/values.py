# SPDX-License-Identifier: Apache-2.0
"""Values of a YAML file, each with its place: what is wrong is refused with file, line and key."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

import yaml

from writeback_exporter.web.policy import ConfigError

_YAML = "tag:yaml.org,2002:"
_SCALARS = {_YAML + name for name in ("str", "int", "float", "bool", "timestamp")}
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}
_TRUE = ("true", "yes", "on")
"""What YAML 1.1 takes for true, whatever its case."""


@dataclass(frozen=True, slots=True)
class Value:
    """A node of a file. The error messages never quote it: it may be a secret.

    It is read from the nodes, not from the objects that PyYAML makes of them: those no longer know
    their line, nor that a key came twice, nor how a user was written who is named 0123 or no.
    """

    file: str
    key: str
    node: yaml.Node | None

    def refusal(self, reason: str) -> ConfigError:
        line = f":{self.node.start_mark.line + 1}" if self.node else ""
        name = self.key if self.key.isprintable() else repr(self.key)
        key = f" {name[:200]}:" if name else ""
        return ConfigError(f"{self.file}{line}:{key} {reason}")

    def fields(self, known: Collection[str] = ()) -> dict[str, Value]:
        """By key: those `known`, without what is null; or, where none are given, any keys."""
        if self._null():
            return {}
        if not isinstance(self.node, yaml.MappingNode):
            raise self.refusal("is to be a mapping, `key: value` in lines of their own")
        found: dict[str, Value] = {}
        for key, node in self.node.value:
            name = Value(self.file, f"a key of {self.key}" if self.key else "a key", key).text()
            path = f"{self.key}.{name}" if self.key else name
            value = Value(self.file, path, node)
            if known and name not in known:
                raise Value(self.file, path, key).refusal(
                    f"unknown; remove it, or choose of {', '.join(sorted(known))}"
                )
            if name in found:
                raise Value(self.file, path, key).refusal("is there twice; remove one")
            found[name] = value
        return {name: value for name, value in found.items() if not (known and value._null())}

    def text(self) -> str:
        if not isinstance(self.node, yaml.ScalarNode) or self.node.tag not in _SCALARS:
            raise self.refusal("is to be a string")
        return str(self.node.value)

    def texts(self) -> list[str]:
        return [value.text() for value in self.items()]

    def items(self) -> list[Value]:
        if not isinstance(self.node, yaml.SequenceNode):
            raise self.refusal("is to be a list, `- value` in lines of their own")
        return [Value(self.file, self.key, node) for node in self.node.value]

    def flag(self) -> bool:
        if not isinstance(self.node, yaml.ScalarNode) or self.node.tag != _YAML + "bool":
            raise self.refusal("is to be true or false")
        return self.node.value.lower() in _TRUE

    def number(self) -> int:
        text = self.text()
        if not re.fullmatch(r"[0-9]{1,9}", text):
            raise self.refusal("is to be a whole number")
        return int(text)

    def duration(self) -> float:
        """Seconds of a duration as Go writes it, such as 1.5s or 1m30s; a bare number is ns."""
        text = self.text()
        if re.fullmatch(r"[0-9]{1,18}", text):
            return int(text) * 1e-9
        if not re.fullmatch(rf"(?:{_PART})+", text):
            raise self.refusal("is to be a duration, such as 500ms, 1.5s or 1m30s")
        return sum(float(count) * _UNITS[unit] for count, unit in re.findall(_PART, text))

    def _null(self) -> bool:
        return self.node is None or (
            isinstance(self.node, yaml.ScalarNode) and self.node.tag == _YAML + "null"
        )


_PART = rf"([0-9]{{1,9}}(?:\.[0-9]{{1,9}})?)({'|'.join(_UNITS)})"


def read_yaml(file: str, content: bytes) -> Value:
    """The one document of a file; null where it has none. Raises ConfigError."""
    try:
        return Value(file, "", yaml.compose(content.decode(), Loader=yaml.SafeLoader))
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: is not text in UTF-8") from None
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{file}{line}: is not YAML: {_one_line(error.problem)}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: is not YAML: {_one_line(error)}") from None
    except RecursionError:
        raise ConfigError(f"{file}: is nested too deeply") from None


def _one_line(text: object) -> str:
    return " ".join(str(text).split())
