"""Training and held-out prompts for a draft: seeded templates over word lists, and slices of openly licensed Python text.

Six kinds that stand for what people decode: code, lists of facts, JSON, repetition, open prose, instructions.
The held-out prompts use templates and subjects that no training prompt uses.
"""

import json
import pathlib
import random
import sysconfig

LIBRARY_SHARE = 0.4  # of the code prompts: real code keeps the templates honest
CHAT_SHARE = 0.08  # of list and JSON prompts that come as an instruction
OPENING_SHARE = 0.4  # of the prompts of a kind that has openings: a word or two, from which the target samples its own way into a text
SHORTEST, LONGEST = 4, 96  # ids a prompt; a shorter one is an opening

KINDS = ("code", "list", "json", "repeat", "prose", "chat")
OPENINGS = {
    "code": ["def", "class", "import", "from", "    def", "#", "if", "for", "@", "try:", "const", "function", "#include <",
        "public static", "async def", "let", "var", "package", "SELECT", "while", "return", "$", "<div"],
    "prose": ["The", "A", "In", "When", "It", "She", "He", "I", "My", "There", "After", "If", "On", "One", "We", "They", "As", "Many",
        "Every", "What", "How", "Why", "For", "At", "By", "Once", "Some", "Most", "While", "Our", "You", "This"],
    "list": ["1.", "-", "*", "Top", "List", "# ", "Here are", "The most", "Some of", "Types of", "Names of", "How to", "A list of",
        "Steps"],
    "json": ['{"', '[{"', "{", "[", "<", "name,", "id,", "- ", "---", "<?xml"],
}  # fmt: skip

PLACES = """a mountain village|an old railway station|a desert caravan|a night market|a flooded valley|a quiet library|the space station|a bakery at dawn
a hospital corridor|the school playground|an abandoned factory|a vineyard in autumn|the royal palace|a crowded airport|a fishing boat on a lake|the edge of a forest
a frozen river|the theatre after closing|a small apartment in the city|a monastery garden|a travelling circus|a coal mine|the botanical garden|a suburban kitchen
an archaeological dig|a country fair|the concert hall|a border crossing|the observatory|a repair shop|a long train journey|the stables of a farm""".replace(
    "\n", "|"
).split("|")
PEOPLE = """Anna|Miguel|Dr. Chen|the old clockmaker|a young violinist|Captain Rhodes|Fatima|the postman|Grandmother Ida|a tired detective|Samuel|the new teacher|Priya|the gardener
Elena|two brothers|a retired engineer|the night nurse|Tomas|a shy apprentice|the mayor's daughter|Olu|a stray dog|the last librarian|Henry|a robot named Pip|Sofia|the baker
a lost traveller|Professor Lang|Mei|the carpenter|a young prince|Nadia""".replace("\n", "|").split("|")
EVENTS = """found a letter under the floor|lost the only key|heard music nobody else could hear|decided to leave|met an old friend|discovered a hidden door|waited for the rain to stop
broke a promise|planted a strange seed|repaired a broken radio|missed the last train|wrote a song|told the truth at last|saw a light in the window|bought a map from a stranger
opened a small shop|learned to cook|lost a race|built a kite|followed the tracks in the snow|painted the wall blue|forgot an important name|won a wager
returned after many years""".replace("\n", "|").split("|")
TOPICS = """photosynthesis|inflation|the water cycle|black holes|sourdough bread|electric cars|the Roman Empire|machine learning|healthy sleep|volcanoes|the immune system|public transport
coffee|chess openings|bees and pollination|the printing press|climate change|solar panels|the French Revolution|vaccines|jazz music|budgeting|time management|earthquakes|gravity
the silk road|recycling|yoga|the stock market|dinosaurs|ocean currents|meditation|antibiotics|glaciers|the Renaissance|urban farming|cyber security|databases|operating systems
the human heart|migration of birds|tea|gardening|photography|the moon landing|DNA|plate tectonics|marathon training|public speaking|negotiation|renewable energy|the Internet
cloud computing|bicycles|cheese making|the brain|nutrition|remote work|hash tables|recursion|sorting algorithms|the periodic table|magnets|rainbows|coral reefs|architecture
ancient Egypt|the Olympic Games|poetry|film making|insurance|mortgages|dogs and their training|cats|whales|wolves|rice farming|textiles|steam engines|aviation|submarines|bridges
tunnels|elections|courts of law|friendship|loneliness|happiness|leadership|team work|writing essays|learning a language|music theory|painting with oils|pottery|knitting
wood carving|hiking|camping|swimming|tennis|football tactics|cricket""".replace("\n", "|").split("|")
THINGS = """apples|books|chairs|drums|engines|flowers|gloves|hats|islands|jackets|kettles|lamps|mirrors|needles|onions|pencils|quilts|ropes|shoes|tables|umbrellas|vases|wheels|bottles
candles|doors|eggs|forks|guitars|horses|keys|ladders|maps|nails|oranges|paintings|rings|stones|trees|violins|windows|boxes|cups|dishes|carrots|tomatoes|laptops|phones|cameras|clocks
spoons|rabbits|ducks|foxes|bears|tigers|cars|buses|trains|planes|tickets|coins|stamps|cards|blankets|pillows|towels|brushes|buckets|baskets""".replace(
    "\n", "|"
).split("|")
FACTS = """chemical elements and their symbols|planets and their distance from the sun|inventors and their inventions|animals and the sounds they make|animals and their young
authors and their famous novels|painters and their famous works|composers and their symphonies|currencies by country|languages spoken by country|months and the number of days
mountains and their height|rivers and the continent they cross|instruments and their family|fruits and their colour|vegetables and how to store them|sports and the number of players
programming languages and their creators|file extensions and what they mean|HTTP status codes|units of length|Greek letters|constellations|bones of the human body|vitamins and their sources
gods of Greek mythology|US states and their abbreviations|world wonders and where they are|scientists and their discoveries|shapes and their number of sides|gemstones and their colours
Roman numerals|planets of the solar system|trees and their leaves|breeds of dogs|types of clouds|types of pasta|spices and dishes that use them|dances and where they come from
kings and queens of England|presidents of the United States|airports and their codes|car makers and their models|board games|tools and what they are for|Linux commands|SQL keywords
Python built-in functions|famous battles and their years|national dishes|flags and their colours|oceans by size|deserts by size|lakes by depth|birds and their diet|parts of a plant
organs and what they do|days of the week|kitchen tools|hobbies for winter|colours of the rainbow|hormones|emperors of Rome|prime numbers|square numbers|cubes of numbers
powers of two|antonyms|synonyms|irregular verbs and their past tense|plural nouns""".replace("\n", "|").split("|")
PAIRS = """Gold: Au|Silver: Ag|Iron: Fe|Oxygen: O;cow: calf|horse: foal|cat: kitten|dog: puppy;Japan: yen|India: rupee|Russia: ruble|Mexico: peso;dog: bark|cat: meow|cow: moo|duck: quack
go: went|see: saw|eat: ate|run: ran;hot: cold|big: small|fast: slow|up: down;Mercury: 1|Venus: 2|Earth: 3|Mars: 4;200: OK|301: Moved Permanently|404: Not Found|500: Internal Server Error
Picasso: Guernica|Monet: Water Lilies|Van Gogh: The Starry Night;Dickens: Oliver Twist|Tolstoy: War and Peace|Orwell: 1984;triangle: 3|square: 4|pentagon: 5|hexagon: 6
Edison: light bulb|Bell: telephone|Watt: steam engine;Brazil: Portuguese|Austria: German|Egypt: Arabic|Chile: Spanish;child: children|mouse: mice|foot: feet|tooth: teeth
Texas: TX|Ohio: OH|Nevada: NV|Florida: FL;January: 31|February: 28|March: 31|April: 30;ls: list files|cd: change directory|rm: remove files;.py: Python|.js: JavaScript|.rb: Ruby|.go: Go
banana: yellow|cherry: red|lime: green|plum: purple;violin: strings|flute: woodwind|trumpet: brass|drum: percussion;heart: pumps blood|lungs: breathe air|kidneys: filter blood
Everest: 8849 m|K2: 8611 m|Kangchenjunga: 8586 m;Zeus: sky|Poseidon: sea|Hades: underworld|Ares: war;1: I|5: V|10: X|50: L;ruby: red|emerald: green|sapphire: blue|amethyst: purple
poodle: France|beagle: England|akita: Japan;kilometre: 1000 m|metre: 1 m|centimetre: 0.01 m;basketball: 5|football: 11|volleyball: 6|baseball: 9;len: length of a sequence|sum: add the items|max: the largest item
bee: hive|bird: nest|bear: den|spider: web;shirt: cotton|ring: gold|window: glass|table: wood;red: stop|amber: wait|green: go""".replace(
    "\n", ";"
).split(";")
NAMES = [
    "Alice",
    "Bob",
    "Carol",
    "David",
    "Eve",
    "Frank",
    "Grace",
    "Hugo",
    "Irene",
    "Jack",
    "Karen",
    "Leo",
    "Maria",
    "Nina",
    "Oscar",
    "Paula",
    "Quinn",
    "Rosa",
    "Sam",
    "Tina",
    "Umar",
    "Vera",
    "Will",
    "Xena",
    "Yuri",
    "Zoe",
]
CITIES = [
    "Boston",
    "Leeds",
    "Lyon",
    "Osaka",
    "Porto",
    "Turin",
    "Denver",
    "Krakow",
    "Bergen",
    "Cork",
    "Mumbai",
    "Perth",
    "Lagos",
    "Quito",
    "Busan",
    "Dallas",
    "Hamburg",
    "Seville",
    "Utrecht",
    "Geneva",
]
FIELDS = {
    "id": "i",
    "name": "n",
    "city": "c",
    "price": "f",
    "quantity": "i",
    "active": "b",
    "color": "w",
    "title": "t",
    "year": "y",
    "score": "f",
    "email": "e",
    "status": "s",
    "age": "a",
    "category": "t",
    "weight": "f",
    "in_stock": "b",
    "date": "d",
    "owner": "n",
    "level": "i",
    "size": "z",
    "rating": "f",
    "code": "k",
    "type": "t",
    "count": "i",
}
COLLECTIONS = [
    "orders",
    "products",
    "books",
    "sensors",
    "invoices",
    "students",
    "movies",
    "recipes",
    "tickets",
    "servers",
    "flights",
    "pets",
    "songs",
    "tasks",
    "events",
    "rooms",
    "messages",
    "players",
    "plants",
    "cars",
    "courses",
    "reviews",
    "devices",
    "jobs",
]
VERBS = """reverse|count|find|merge|split|parse|format|validate|load|save|filter|remove|convert|sort|search|print|check|create|update|normalize|compute|flatten|rotate|encode|decode
extract|replace|group|sum|join|collect|read|write|draw|insert|delete|encrypt|tokenize|copy|swap|shuffle|resize|classify|compare""".replace(
    "\n", "|"
).split("|")
NOUNS = """words|vowels|list|string|dates|lines|file|matrix|tree|graph|node|queue|stack|numbers|characters|email|url|password|path|rows|columns|json|csv|config|user|table|image|pixels
palindrome|anagrams|duplicates|primes|digits|sentence|dictionary|keys|values|tuples|intervals|points|polygon|temperature|names|scores|grades|items|orders|tokens|bits|binary""".replace(
    "\n", "|"
).split("|")
CLASSES = [
    "Stack",
    "Queue",
    "BankAccount",
    "Rectangle",
    "Person",
    "Inventory",
    "Timer",
    "Logger",
    "Matrix",
    "Node",
    "LinkedList",
    "Counter",
    "Cache",
    "Parser",
    "Vehicle",
    "Employee",
    "Library",
    "Player",
    "Game",
    "Robot",
    "Circle",
    "Polynomial",
    "Student",
    "Server",
    "Client",
]
QUESTIONS = """What is {t}?|How does {t} work?|Explain {t} to a child.|Why is {t} important?|Write a short paragraph about {t}.|Give me five tips about {t}.|List the main ideas behind {t}.
Write a poem about {t}.|What are the advantages and disadvantages of {t}?|Summarize the history of {t}.|Write an email to a colleague about {t}.|What should a beginner know about {t}?
Compare {t} and {u}.|Write a short dialogue about {t}.|Give three examples of {t}.|Write a step by step guide to {t}.|Who should care about {t}, and why?|Make a table of facts about {t}.""".replace(
    "\n", "|"
).split("|")
PROSE = """{P} {e} in {p}. |The story of {q} begins in {p}. |It was a cold morning in {p} when {q} {e}.|Nobody in {p} remembered how {q} {e}. |{P} had always wanted to see {p}. One day,
Once upon a time in {p}, {q} {e}. |The history of {t} is|{T} is one of the most|In this article, we will look at {t}.|When people talk about {t}, they often forget|There are many reasons to learn about {t}.
The first time I thought about {t}, I was in {p}.|Dear diary, today I|The science of {t} has changed|Chapter 1\n\n{P} {e}.|"I never wanted this," said {q}. |A short essay on {t}\n\n|News report: {P} {e} near {p}.""".replace(
    "\n", "|"
).split("|")
HELD_OUT = {
    "code": [
        "def celsius_to_kelvin(value):\n    return value",
        "class Aquarium:\n    def __init__(self, litres):\n",
        "import math\n\ndef hypotenuse(a, b):\n",
        'def is_leap(year):\n    """Tell whether a year is a leap year."""\n',
        "def first(items):\n    return items[0]\n\ndef second(items):\n    return items[1]\n\ndef third(",
        "def square_area(side):\n    return side * side\n\ndef circle_area(radius):\n    return 3.14159 * radius * radius\n\ndef",
        'for i in range(10):\n    if i % 2 == 0:\n        print(i, "is even")\n',
        "def fibonacci(n):\n    if n < 2:\n        return n\n",
        "SELECT name, salary FROM staff WHERE",
        'function greet(visitor) {\n  return "Hello, "',
    ],
    "list": [
        "Here is a list of metals and their melting points:\n1. Tin: 232 C\n2. Lead: 327 C\n3.",
        "A list of countries and their continents:\n- Peru: South America\n- Kenya: Africa\n-",
        "Ten card games and the number of players:\n\n1. Bridge: 4\n2. Poker:",
        "Insects and their number of legs and wings:\n* ant:",
        "Poets and where they were born:\n- Neruda: Chile\n- Yeats: Ireland\n-",
        "List of seas and the countries around them:\n1. Black Sea:",
        "Breads of the world:\n- baguette (France)\n- naan (India)\n-",
        "Knots and their uses:\n1. Bowline:",
        "States and their largest cities:\nGeorgia - Atlanta\nIllinois - Chicago\nWashington -",
        "Seven famous ships, one per line:\n1. Titanic\n2.",
    ],
    "json": [
        '[\n  {"bird": "heron", "length_cm": 95, "migrates": true},\n  {"bird": "wren", "length_cm": 10, "migrates": false},\n',
        '{"aquarium": [{"fish": "guppy", "age": 1}, {"fish": "tetra", "age": 2}, ',
        '[{"lane": 1, "swimmer": "Kirsten", "time": 58.3}, {"lane": 2, "swimmer": "Ayla", "time": 57.9}, ',
        '{\n  "museum": "City Gallery",\n  "halls": [\n    {\n      "hall": 1,\n      "theme": "armour"\n    },\n',
        '{"type": "object", "properties": {"height": {"type": "number"},',
        "wagon,load,driver\n1,coal,Jonas\n2,timber,Petra\n",
        "- hive: 1\n  frames: 8\n  queen: marked\n- hive: 2\n",
        '<shelf>\n  <jar label="honey" grams="250"/>\n  <jar label="jam" grams="300"/>\n',
        '{"lens": 50, "aperture": 1.8, "shots": [',
        '[\n  {\n    "glacier": "Aletsch",\n    "length_km": 22.6\n  },\n  {',
    ],
    "repeat": [
        "tick tock tick tock tick tock",
        "ab ab cd ab ab cd ab ab cd",
        "week 1, week 2, week 3, week 4,",
        "The owl sleeps. The owl wakes. The owl sleeps. The owl wakes.",
        "100 200 300 400 500",
        "* ** *** * ** *** * **",
        "left, right, right, left, right, right, left,",
        "step 1: push\nstep 2: pull\nstep 3: push\nstep 4: pull\n",
        "la la la, lo lo lo, la la la, lo lo lo,",
        "Z Y X W V U",
    ],
    "prose": [
        "The shepherd counted his flock again in the fog, and",
        "An orchestra had rehearsed in the tram depot since the war.",
        "Rivers shape the towns on their banks because",
        "The glass blower wiped her forehead and looked at",
        "Of all the trades in the harbour of Skagen, the oldest is",
        "My uncle kept a parrot that",
        "Winter came early to the plateau that year.",
        "Philosophers have argued about luck for",
        "The ferry was late, as it was every",
        "A letter from the lawyer arrived on Tuesday:",
    ],
    "chat": [
        "How do tides work?",
        "Write a haiku about a kettle.",
        "Give me four ideas for a rainy weekend.",
        "What is the difference between a lake and a pond?",
        "Write a Python function that returns the median of a list.",
        "Explain how a lock on a canal works.",
        'Translate "good morning" into four languages.',
        "Who was Hypatia?",
        "Write a product description for a wooden spoon.",
        "Why do leaves change colour?",
    ],
}


def value(rng, kind):
    """One random JSON value of a field kind."""
    word = rng.choice(THINGS)
    return {
        "i": rng.randint(1, 500),
        "f": round(rng.uniform(0.5, 99), rng.choice([1, 2])),
        "b": rng.random() < 0.5,
        "n": rng.choice(NAMES),
        "c": rng.choice(CITIES),
        "w": word[:-1],
        "t": f"{rng.choice(NOUNS)} {word}".title(),
        "y": rng.randint(1950, 2030),
        "e": f"{rng.choice(NAMES).lower()}@example.com",
        "s": rng.choice(["open", "closed", "pending", "done"]),
        "a": rng.randint(5, 90),
        "d": f"20{rng.randint(10, 30)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}",
        "z": rng.choice("SMLX"),
        "k": f"{word[:3].upper()}{rng.randint(1, 99)}",
    }[kind]


def records(rng, count):
    """Records that share their fields; ids count upwards half of the time."""
    fields = rng.sample(sorted(FIELDS), rng.randint(2, 5))
    rows = [{name: value(rng, FIELDS[name]) for name in fields} for _ in range(count)]
    if rng.random() < 0.5:
        start = rng.choice([1, 1, 10, 100])
        rows = [
            {"id": start + i, **{key: item for key, item in row.items() if key != "id"}} for i, row in enumerate(rows)
        ]
    return rows


def json_text(rng, count):
    """Records as JSON in one of four layouts, as CSV, YAML or lines; the end is left open."""
    rows, name = records(rng, count), rng.choice(COLLECTIONS)
    style = rng.randrange(7)
    if style == 0:
        return "[\n" + "".join(f"  {json.dumps(row)},\n" for row in rows)
    if style == 1:
        return json.dumps(rows)[:-1] + ", "
    if style == 2:
        return json.dumps({name: rows}, indent=rng.choice([2, 4])).rstrip("}] \n") + "},\n"
    if style == 3:
        return f'{{"{name}": {json.dumps(rows)[:-1]}, '
    if style == 4:
        return ",".join(rows[0]) + "\n" + "".join(",".join(str(item) for item in row.values()) + "\n" for row in rows)
    if style == 5:
        return f"{name}:\n" + "".join(
            "".join(f"{'  - ' if i == 0 else '    '}{key}: {item}\n" for i, (key, item) in enumerate(row.items()))
            for row in rows
        )
    return (
        rng.choice(["A JSON list of {}:\n", "Here is a JSON array of {}:\n\n", "{} as JSON:\n"]).format(name)
        + "[\n"
        + "".join(f"  {json.dumps(row)},\n" for row in rows)
    )


def list_text(rng, count):
    """A heading and the first entries of a list of facts."""
    title = rng.choice(FACTS)
    head = rng.choice(
        [
            "Here is a list of {}:",
            "A list of {}:",
            "List of {}",
            "{}:",
            "Ten {}:",
            "The following are {}:",
            "# {}",
            "Facts: {}",
        ]
    ).format(title)
    mark = rng.choice(["{}. ", "- ", "* ", "", "{}) "])
    if rng.random() < 0.35:
        return head + rng.choice(["\n", "\n\n"]) + mark.format(1)
    pairs = rng.choice(PAIRS).split("|")
    rng.shuffle(pairs)
    gap = rng.choice([": ", " - ", " = ", " -> ", ", ", " is "])
    lines = [mark.format(i + 1) + pair.replace(": ", gap, 1) for i, pair in enumerate(pairs[:count])]
    return (head + "\n" if rng.random() < 0.3 else "") + "\n".join(lines) + "\n"


def repeat_text(rng, count):
    """A pattern begun: words in a cycle, counting, or a sentence with one slot that moves."""
    words = rng.sample(THINGS + NOUNS + NAMES, rng.randint(1, 5))
    gap, style = rng.choice([" ", ", ", "\n", " - ", "; "]), rng.randrange(6)
    if style == 0:
        return gap.join(words * (count + 1)) + gap.rstrip(" ")
    if style == 1:
        start, step = rng.randint(0, 60), rng.choice([1, 1, 1, 2, 3, 5, 10, -1])
        return gap.join(str(start + step * i) for i in range(count + 3)) + gap.rstrip(" ")
    if style == 2:
        label = rng.choice(["Line", "Day", "Item", "Level", "Room", "Test", "Round", "No.", "Row", "Page"])
        return "".join(f"{label} {i + 1}{rng.choice([':', '.'])} {words[i % len(words)]}\n" for i in range(count + 1))
    if style == 3:
        line = rng.choice(
            [
                "I see the {}. ",
                "One {} for me, one {} for you. ",
                "The {} is here.\n",
                "We have {} and {}. ",
                "{} goes in, {} goes out.\n",
            ]
        ).replace("{}", "{0}")
        return "".join(line.format(words[i % len(words)]) for i in range(count + 1))
    if style == 4:
        return "".join(f"{i + 1} {words[0]}, " for i in range(count + 2))
    return (" ".join(words) + ". ") * (count + 1)


BODIES = (
    "return {v}(x)", "return x.{v}()", "print('{v}', x)", "return [i.{v} for i in x]", "return self.{v}", "x.{v} = True",
)  # fmt: skip


def code_text(rng, count):
    """The start of a small program: functions that follow one pattern, a class, a signature with a docstring."""
    verb, noun, other, style = rng.choice(VERBS), rng.choice(NOUNS), rng.choice(NOUNS), rng.randrange(7)
    if style == 0:
        return f'def {verb}_{noun}({other}):\n    """{verb.capitalize()} the {noun} of the {other}."""\n'
    if style == 1:
        body = rng.choice(BODIES)
        return "".join(
            f"def {v}_{noun}(x):\n    {body.format(v=v)}\n\n" for v in rng.sample(VERBS, min(count, 3))
        ) + rng.choice(["", "def"])
    if style == 2:
        name, attr = rng.choice(CLASSES), rng.choice(NOUNS)
        return f"class {name}:\n    def __init__(self, {attr}):\n        self.{attr} = {attr}\n\n    def {verb}"
    if style == 3:
        return f"import {rng.choice(['os', 'json', 're', 'random', 'sys', 'csv', 'datetime', 'collections'])}\n\n\ndef {verb}_{noun}({other}"
    if style == 4:
        return f"# {verb.capitalize()} the {noun} and print the {other}\n"
    if style == 5:
        return rng.choice(
            [
                f"function {verb}{noun.capitalize()}({other}) {{\n",
                f"public class {rng.choice(CLASSES)} {{\n    private int {noun};\n",
                f"#include <stdio.h>\n\nint {verb}_{noun}(int {other}) {{\n",
                f"SELECT {noun} FROM {other} WHERE ",
                f"CREATE TABLE {noun} (\n    id INTEGER PRIMARY KEY,\n",
                f"<html>\n<head>\n<title>{noun}</title>\n",
            ]
        )
    return f"def test_{verb}_{noun}():\n    assert {verb}({rng.choice(['[]', '0', '1', 'None'])}) == "


def prose_text(rng, count):
    """An opening of a story, an article or a diary."""
    person, topic = rng.choice(PEOPLE), rng.choice(TOPICS)
    return (
        rng.choice(PROSE)
        .format(
            P=person[0].upper() + person[1:],
            q=person,
            e=rng.choice(EVENTS),
            p=rng.choice(PLACES),
            t=topic,
            T=topic[0].upper() + topic[1:],
        )
        .rstrip(" ")
    )


def chat_text(rng, count):
    """A question or an instruction, of every kind above."""
    if rng.random() < 0.7:
        return rng.choice(QUESTIONS).format(t=rng.choice(TOPICS), u=rng.choice(TOPICS))
    return rng.choice(
        [
            f"Write a Python function to {rng.choice(VERBS)} {rng.choice(NOUNS)}.",
            f"Write a JSON list of three {rng.choice(COLLECTIONS)}.",
            f"List ten {rng.choice(FACTS)}.",
            f"Write a story in which {rng.choice(PEOPLE)} {rng.choice(EVENTS)}.",
            f"Write a class {rng.choice(CLASSES)} in Python.",
            f"Continue the pattern: {repeat_text(rng, 2)}",
            f"How many {rng.choice(THINGS)} are in a dozen? Explain.",
        ]
    )


MAKERS = {
    "code": code_text,
    "list": list_text,
    "json": json_text,
    "repeat": repeat_text,
    "prose": prose_text,
    "chat": chat_text,
}


def library_files():
    """Python sources of the running standard library: openly licensed (PSF), the same kind of text everywhere."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    return sorted(
        path
        for path in root.rglob("*.py")
        if not {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "operator.py"} & set(path.parts)
    )


def library_slice(rng, files, characters):
    """A slice of a library file (source, docstrings and the language reference in pydoc_data), begun at a line."""
    lines = rng.choice(files).read_text(encoding="utf-8", errors="ignore").splitlines(keepends=True)
    start = rng.randrange(max(1, len(lines) - 12))
    return "".join(lines[start : start + 80])[:characters]


def training_texts(kind, seed):
    """Endless (text, is_instruction) of a kind; part of the code is slices of the standard library."""
    rng, files = random.Random(f"{kind}-{seed}"), library_files() if kind == "code" else []
    while True:
        if kind in OPENINGS and rng.random() < OPENING_SHARE:
            yield rng.choice(OPENINGS[kind]), False
            continue
        if kind == "code" and rng.random() < LIBRARY_SHARE:
            text = library_slice(rng, files, rng.randint(80, 240))
        else:
            text = MAKERS[kind](rng, rng.randint(1, 4)).rstrip(" ")
        yield text, kind == "chat" or (kind in ("list", "json") and rng.random() < CHAT_SHARE)


def as_ids(tokenizer, text, instruction):
    """Ids of a raw text, or of an instruction through the chat template."""
    if instruction:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def training_prompts(tokenizer, kind, count, seed):
    """Token-id lists for `count` prompts of a kind, the same for the same seed."""
    texts = training_texts(kind, seed)
    return [as_ids(tokenizer, *next(texts))[:LONGEST] for _ in range(count)]


def held_out_prompts(tokenizer):
    """(kind, ids) of the fixed held-out prompts."""
    return [(kind, as_ids(tokenizer, text, kind == "chat")) for kind, texts in HELD_OUT.items() for text in texts]
