"""Functions that problems offer, with every name that they and their parameters may have."""

from __future__ import annotations

from dataclasses import dataclass

from tiny_model.extraction import Make, number, one_of
from tiny_model.words import CITIES, COLORS, DAYS, EVENTS, GOODS, ITEMS, NAMES, NOUNS, some_time


@dataclass(frozen=True, slots=True)
class Parameter:
    names: tuple[str, ...]
    type: str
    make: Make
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Function:
    """`requests` name every parameter by its letter."""

    names: tuple[str, ...]
    description: str
    parameters: dict[str, Parameter]
    requests: tuple[str, ...]


def text(names: str, make: Make) -> Parameter:
    return Parameter(tuple(names.split()), "string", make)


def whole(names: str, low: int, high: int) -> Parameter:
    return Parameter(tuple(names.split()), "integer", number(low, high))


def choice(names: str, choices: str) -> Parameter:
    values = choices.split()
    return Parameter(tuple(names.split()), "string", one_of(values), tuple(values))


def function(names: str, description: str, parameters: dict[str, Parameter], *requests: str) -> Function:
    return Function(tuple(names.split()), description, parameters, requests)


CITY = text("city location place", one_of(CITIES))
PERSON = text("name person to", one_of(NAMES))
DAY = text("day date", one_of(DAYS))
TIME = text("time at", some_time)

FUNCTIONS = (
    function(
        "get_weather weather current_weather",
        "Returns the weather of a city.",
        {"c": CITY},
        "What is the weather in {c}?",
        "How is the weather in {c}?",
        "Tell me the weather in {c}.",
    ),
    function(
        "get_forecast forecast",
        "Returns the weather of the next days.",
        {"c": CITY, "d": whole("days count", 2, 10)},
        "What will the weather be in {c} in the next {d} days?",
        "Give me the forecast of {d} days for {c}.",
    ),
    function(
        "get_time current_time clock",
        "Returns the time in a city.",
        {"c": CITY},
        "What time is it in {c}?",
        "Tell me the time in {c}.",
    ),
    function(
        "send_message message_person write_to",
        "Sends a message to a person.",
        {"n": PERSON, "t": text("text message body", one_of([f"the {w} is here" for w in NOUNS[:60]]))},
        'Send {n} the message "{t}".',
        'Tell {n}: "{t}".',
        'Write "{t}" to {n}.',
    ),
    function("set_alarm alarm wake", "Sets an alarm.", {"t": TIME}, "Wake me at {t}.", "Set an alarm for {t}."),
    function(
        "set_timer timer",
        "Starts a timer.",
        {"m": whole("minutes duration", 1, 90)},
        "Set a timer for {m} minutes.",
        "Start a timer of {m} minutes.",
    ),
    function(
        "convert_money convert_currency exchange",
        "Converts money.",
        {
            "a": whole("amount value", 1, 1000),
            "f": choice("from source", "dollar euro yen pound"),
            "t": choice("to target", "krone peso rupee won"),
        },
        "Convert {a} {f} to {t}.",
        "How much is {a} {f} in {t}?",
    ),
    function(
        "add_numbers add plus",
        "Adds two numbers.",
        {"a": whole("a x first", 0, 1000), "b": whole("b y second", 0, 1000)},
        "Add {a} and {b} with the tool.",
        "Use the tool to add {a} and {b}.",
    ),
    function(
        "book_table reserve_table",
        "Books a table in a restaurant.",
        {"p": whole("people guests", 2, 12), "d": DAY, "t": TIME},
        "Book a table for {p} people on {d} at {t}.",
        "I need a table for {p} on {d} at {t}.",
    ),
    function(
        "find_trains search_trains trains",
        "Finds trains between two cities.",
        {"a": text("from origin start", one_of(CITIES[:15])), "b": text("to destination end", one_of(CITIES[15:]))},
        "Find trains from {a} to {b}.",
        "Which trains go from {a} to {b}?",
    ),
    function(
        "set_light light_color",
        "Sets the color of a lamp.",
        {"r": choice("room place", "kitchen garden office hall"), "c": text("color colour", one_of(COLORS))},
        "Make the light in the {r} {c}.",
        "Set the {r} light to {c}.",
    ),
    function(
        "set_temperature heat",
        "Sets the temperature of a room.",
        {"r": choice("room place", "kitchen garden office hall"), "t": whole("degrees temperature", 10, 30)},
        "Set the {r} to {t} degrees.",
        "I want {t} degrees in the {r}.",
    ),
    function(
        "search_shop find_product",
        "Searches a shop.",
        {"g": text("product item query", one_of(GOODS)), "p": whole("max_price limit", 5, 500)},
        "Find a {g} for at most {p} dollars.",
        "I want a {g} that costs less than {p} dollars.",
    ),
    function(
        "add_event create_event",
        "Adds an event to the calendar.",
        {"e": text("title event", one_of(EVENTS)), "d": DAY, "t": TIME},
        "Put a {e} into my calendar, on {d} at {t}.",
        "Add a {e} on {d} at {t} to the calendar.",
    ),
    function(
        "order_items order buy",
        "Orders things.",
        {"q": whole("quantity amount", 2, 100), "i": text("item article", one_of(ITEMS))},
        "Order {q} {i}.",
        "Please buy {q} {i} for me.",
    ),
    function(
        "play_music play",
        "Plays music.",
        {"s": choice("style genre", "jazz rock folk blues"), "v": whole("volume level", 1, 11)},
        "Play {s} at volume {v}.",
        "Put on some {s}, volume {v}.",
    ),
    function(
        "call_person phone dial", "Calls a person.", {"n": PERSON}, "Call {n}.", "I want to talk to {n} on the phone."
    ),
    function(
        "translate_word translate",
        "Translates a word.",
        {"w": text("word text", one_of(NOUNS)), "l": choice("language to", "French German Spanish Italian")},
        'Translate "{w}" into {l}.',
        'What is "{w}" in {l}?',
    ),
    function(
        "roll_dice dice",
        "Rolls dice.",
        {"n": whole("count number", 1, 10), "s": whole("sides faces", 4, 21)},
        "Roll {n} dice with {s} sides.",
        "Throw {n} dice of {s} sides.",
    ),
    function(
        "remember_word store save",
        "Stores a value under a name.",
        {"k": text("key name", one_of(NOUNS)), "v": whole("value number", 0, 1000)},
        "Remember that {k} is {v}.",
        "Save {v} as {k}.",
    ),
)
