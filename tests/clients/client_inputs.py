"""What the clients ask for: an object, and a tool. Some clients read annotations as they are, so
that they must not be text."""

from typing import Literal

from pydantic import BaseModel, Field

MODEL = "smollm2-135m-instruct"
ASK = "A person called Ann, 30 years old, who likes tea."
WEATHER = "What is the weather in Paris?"


class Drink(BaseModel):
    """A drink, hot or cold."""

    name: Literal["tea", "coffee", "water"]
    hot: bool


class Person(BaseModel):
    """A person with a favourite drink."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)
    drink: Drink


def get_weather(city: Literal["Paris", "London", "Rome"]) -> str:
    """The weather of a city."""
    calls.append(city)
    return f"It is sunny in {city}."


calls: list[str] = []
"""Cities that the tool was called with."""
