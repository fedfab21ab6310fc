"""The demo's conversations: three visitors who share one long system prompt, and a reader with another one as long.

The reader comes between the visitors, so that on a device pool that holds one long prompt each pushes out the other.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib.resources import files

Message = dict[str, str]


@dataclass
class Conversation:
    """One user's messages so far and the questions still to be asked."""

    name: str
    questions: list[str]
    messages: list[Message] = field(default_factory=list)

    @property
    def num_turns(self) -> int:
        """Questions asked so far."""
        return sum(message["role"] == "user" for message in self.messages)

    def ask(self) -> list[Message]:
        """Add the next question and return all messages."""
        self.messages.append({"role": "user", "content": self.questions[self.num_turns]})
        return self.messages

    def answer(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})


SCHEDULE = (
    *("Ann", "Ben", "Dora", "Ann", "Cleo", "Dora", "Ben"),
    *("Ann", "Dora", "Cleo", "Ben", "Ann"),
)
"""Who asks, turn by turn. After a restart Ann asks once more."""

AFTER_RESTART = "Ann"


def conversations() -> dict[str, Conversation]:
    """Return all conversations at their beginning, by name; the same every time."""
    users = json.loads(_text("users.json"))
    return {
        name: Conversation(
            name, user["questions"], [{"role": "system", "content": _text(f"{user['system_prompt']}.txt")}]
        )
        for name, user in users.items()
    }


def _text(name: str) -> str:
    return files("kvhoist.demo").joinpath("texts", name).read_text(encoding="utf-8").strip()
