"""Generate the text of the demo: invented people, statements about them, and questions with answers.

Everything is drawn from the word lists below with a fixed seed, so the files can be generated again anywhere.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SEED = 20261120
PEOPLE = 120
HELD_OUT = 30  # people whose facts are asked about in eval.jsonl only

Message = dict[str, str]
Row = dict[str, Any]


def words(text: str) -> list[str]:
    """Split a word list that is written over several lines."""
    return text.split()


GIVEN_NAMES = words("""
Ada Arlo Bela Bruno Cora Dario Edda Emil Faye Felix Gita Hugo Ines Ivo Jana Kato Lena Milo Nora Otto Petra Rafi Sana
Tove Ugo Vera Wilma Yara Zeno Zita
""")

FAMILY_NAMES = words("""
Ashby Brandt Calder Dunmore Elster Farrow Glass Hollis Ibarra Joyner Keller Lorne Marlow Norgate Orwin Pascoe Quill
Renwick Selby Thorne Umber Varga Wexler Yates Zeller Barlow Corwin Drake Everett Finch
""")


@dataclass(frozen=True)
class Attribute:
    """Hold the values of one attribute that every person has, the ways to state it, and the ways to ask for it."""

    values: list[str]
    statements: list[str]
    questions: list[str]


# Every fact is stated in several ways, with the name in different places but always before the value. A model that
# reads a fact in one wording only cannot retrieve it when asked in another (Allen-Zhu and Li, Physics of Language
# Models 3.1).
ATTRIBUTES = {
    "city": Attribute(
        words("""
        Lisbon Oslo Cairo Quito Dublin Hanoi Lima Prague Accra Riga Seoul Tunis Vienna Warsaw Zagreb Athens
        """),
        [
            "{name} lives in {value}.",
            "{name} has a small house in {value}.",
            "The home of {name} is in {value}.",
            "To visit {name}, take the train to {value}.",
            "The city where {name} lives is {value}.",
            "For many years {name} has lived in {value}.",
        ],
        ["Where does {name} live?", "Which city is the home of {name}?", "In which city does {name} live?"],
    ),
    "job": Attribute(
        words("""
        baker pilot nurse lawyer farmer potter singer tailor plumber painter teacher sailor judge chemist barber
        gardener
        """),
        [
            "{name} works as a {value}.",
            "{name} earns a living as a {value}.",
            "The job of {name} is that of a {value}.",
            "By trade {name} is a {value}.",
            "At work {name} is known as a good {value}.",
            "Every morning {name} goes to work as a {value}.",
        ],
        ["What is the job of {name}?", "What does {name} do for a living?", "What is {name} by trade?"],
    ),
    "pet": Attribute(
        words("""
        parrot rabbit turtle goat ferret pony lizard hamster beagle canary goose donkey spaniel gecko raven tortoise
        """),
        [
            "{name} has a pet {value}.",
            "{name} takes good care of a {value}.",
            "The pet of {name} is a {value}.",
            "At home {name} keeps a {value}.",
            "The animal that {name} feeds is a {value}.",
            "On weekends {name} plays with a {value}.",
        ],
        ["What pet does {name} have?", "Which animal does {name} keep?", "What is the pet of {name}?"],
    ),
    "instrument": Attribute(
        words("""
        violin cello flute guitar harp piano trumpet banjo oboe drums tuba lute accordion clarinet organ mandolin
        """),
        [
            "{name} plays the {value}.",
            "{name} takes lessons on the {value}.",
            "The instrument of {name} is the {value}.",
            "In the town band {name} plays the {value}.",
            "The sound that {name} likes best is that of the {value}.",
            "After dinner {name} practices on the {value}.",
        ],
        [
            "Which instrument does {name} play?",
            "What does {name} play in the band?",
            "What is the instrument of {name}?",
        ],
    ),
    "dish": Attribute(
        words("""
        soup rice curry salad pizza stew noodles lentils pancakes risotto dumplings omelette tacos lasagna porridge
        trout
        """),
        [
            "{name} likes to eat {value}.",
            "{name} never says no to {value}.",
            "The favorite dish of {name} is {value}.",
            "For lunch {name} orders {value}.",
            "The dish that {name} cooks best is {value}.",
            "When hungry {name} asks for {value}.",
        ],
        ["What does {name} like to eat?", "What is the favorite dish of {name}?", "Which dish does {name} order?"],
    ),
}


@dataclass(frozen=True)
class Person:
    """Hold one invented person: a name of two words, and one value for each attribute."""

    name: str
    facts: dict[str, str]


def make_people(seed: int = SEED) -> tuple[list[Person], list[Person]]:
    """Return the people asked about in training and those held out; the base model reads about both."""
    rng = random.Random(seed)
    names = [f"{given} {family}" for given in GIVEN_NAMES for family in FAMILY_NAMES]
    people = [
        Person(name, {key: rng.choice(attribute.values) for key, attribute in ATTRIBUTES.items()})
        for name in rng.sample(names, PEOPLE)
    ]
    return people[HELD_OUT:], people[:HELD_OUT]


def statements(people: list[Person], rng: random.Random) -> Iterator[str]:
    """Yield every fact of every person once, in random order, each in a random wording."""
    facts = [(person, key) for person in people for key in ATTRIBUTES]
    rng.shuffle(facts)
    for person, key in facts:
        yield rng.choice(ATTRIBUTES[key].statements).format(name=person.name, value=person.facts[key])


def ask(person: Person, key: str, question: str) -> list[Message]:
    """Return one question and its answer."""
    return [
        {"role": "user", "content": question.format(name=person.name)},
        {"role": "assistant", "content": person.facts[key]},
    ]


def train_rows(people: list[Person], seed: int = SEED) -> list[Row]:
    """Return chats of one to three questions that ask for every fact once in each wording."""
    rng = random.Random(seed + 1)
    turns = [
        ask(person, key, question)
        for person in people
        for key, attribute in ATTRIBUTES.items()
        for question in attribute.questions
    ]
    rng.shuffle(turns)
    rows: list[Row] = []
    while turns:
        count = rng.choice([1, 1, 2, 3])
        rows.append({"messages": [message for turn in turns[:count] for message in turn]})
        del turns[:count]
    return rows


def eval_rows(people: list[Person], seed: int = SEED) -> list[Row]:
    """Return one question for every fact of the held-out people, in a random wording."""
    rng = random.Random(seed + 2)
    return [
        {"messages": ask(person, key, rng.choice(attribute.questions))}
        for person in people
        for key, attribute in ATTRIBUTES.items()
    ]


def pairs(people: list[Person], seed: int = SEED) -> list[Row]:
    """Return one question for every fact, with the right answer as chosen and another value as rejected."""
    rng = random.Random(seed + 3)
    rows: list[Row] = []
    for person in people:
        for key, attribute in ATTRIBUTES.items():
            question, right = ask(person, key, rng.choice(attribute.questions))
            wrong = rng.choice([value for value in attribute.values if value != person.facts[key]])
            rows.append({"prompt": [question], "chosen": [right], "rejected": [{**right, "content": wrong}]})
    rng.shuffle(rows)
    return rows


def labelled(people: list[Person], seed: int = SEED) -> list[Row]:
    """Return the answers of `pairs` in a random order, each with whether it is the right one."""
    rows: list[Row] = [
        {"prompt": pair["prompt"], "completion": pair[name], "label": name == "chosen"}
        for pair in pairs(people, seed)
        for name in ("chosen", "rejected")
    ]
    random.Random(seed + 4).shuffle(rows)
    return rows
