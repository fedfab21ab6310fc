"""The demo's conversations: three visitors who share one long system prompt, and a reader with another one as long.

The reader comes between the visitors, so that on a device pool that holds one long prompt each pushes out the other.
"""

from __future__ import annotations

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


_QUESTIONS = {
    "Ann": (
        "Good morning! I am here with my two children, who are five and nine years old. How much do we have to pay, and "
        "may both of them climb the tower?",
        "Thank you. We came by bus and would like to walk back over the causeway this afternoon. How long does the walk "
        "take, and how do I find out when the sea covers it?",
        "My daughter cannot eat eggs, and my son wants to bring our dog along. Which cake can she have, and where may "
        "the dog go with us?",
        "One last question, please: who was the last keeper of the light, and what was it that she wrote down in her "
        "notebooks all those years?",
        "We would like to come again in December with their grandparents. When are the Lantern Evenings, and what "
        "would five tickets cost us then?",
    ),
    "Ben": (
        "Hello, I am an engineer and came for the machines. How heavy is the great lens, what does it float in, and who "
        "made it, and in which year?",
        "And the fog signal? I read that there are two old diesel engines. Do both of them run, and when can I hear one "
        "of them being started?",
        "What would it take to repair the one that does not run, and how much money has been collected for it so far?",
    ),
    "Cleo": (
        "Hi! I start as a volunteer next week and am a bit nervous. At what time do I have to be there, and what do I do "
        "first when I arrive?",
        "What do I have to do if a visitor is taken ill at the top of the tower while I am the guide on a tour?",
        "And what happens if the wind gets stronger during the day? Who decides whether there are tours, and from when "
        "on are there none at all?",
    ),
    "Dora": (
        "I am writing a chapter about the lost village. On which day was the lake found, how long and how wide is it, "
        "and what was found beside it?",
        "What was in the iron box under the white cairn, and what does the last page of the book in it say about the "
        "winter?",
        "How exact was the survey in the end, and what did Mr Hargreave say about it when they were back on the gravel "
        "bank?",
        "What did the old widow tell Clara after church, and what became of the bell of the chapel?",
    ),
}
_SYSTEM_PROMPT = {"Ann": "handbook", "Ben": "handbook", "Cleo": "handbook", "Dora": "logbook"}

SCHEDULE = ("Ann", "Ben", "Dora", "Ann", "Cleo", "Dora", "Ben", "Ann", "Dora", "Cleo", "Ben", "Ann")
"""Who asks, turn by turn. After a restart Ann asks once more."""

AFTER_RESTART = "Ann"


def system_prompt(name: str) -> str:
    """Return one of the demo's long texts: `handbook` or `logbook`."""
    return files("kvhoist.demo").joinpath("texts", f"{name}.txt").read_text(encoding="utf-8").strip()


def conversations() -> dict[str, Conversation]:
    """Return all conversations at their beginning, by name; the same every time."""
    return {
        name: Conversation(name, list(questions), [{"role": "system", "content": system_prompt(_SYSTEM_PROMPT[name])}])
        for name, questions in _QUESTIONS.items()
    }
