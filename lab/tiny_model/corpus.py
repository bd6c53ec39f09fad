"""The text that the embedded model's tokenizer is trained on: our own sentences, and more made from word lists."""

from __future__ import annotations

import random
from collections.abc import Iterator

SENTENCES = """\
The lighthouse keeper wrote down the weather three times a day, even when nobody asked for it.
A small boat left the harbour before sunrise and came back with more stories than fish.
When the river froze, the children of the village walked to school across the ice.
She kept a box of letters under the stairs and read one of them every winter.
The train was late again, so we shared a pot of tea and talked about the mountains.
Nobody could say who had planted the apple tree, but everyone ate from it.
The recipe needs two cups of flour, one egg, a little salt and a lot of patience.
Fold the paper along the dotted line, turn it over, and press the corner down.
My grandfather repaired clocks; he said that every one of them had its own way of being wrong.
The museum opens at nine, closes at five, and is free for students on Thursdays.
It rained for eleven days, and on the twelfth the valley was full of small yellow flowers.
He learned to play the piano from a book that was missing its last chapter.
The teacher asked a simple question, and the whole class became quiet.
If you follow the path behind the mill, you reach the old bridge in about twenty minutes.
Please close the window before you leave, because the cat likes to explore the roof.
The market sells bread, cheese, honey, candles and, in the autumn, far too many pumpkins.
They measured the field twice and got two different answers, both of them written in ink.
A good map shows not only where the roads are but also where they are missing.
The night sky above the desert was so clear that we could count the stars in the small bear.
Every Sunday the neighbours played chess in the park until the lamps were lit.
Water boils at a lower temperature on a mountain because the pressure of the air is lower there.
Light needs about eight minutes to travel from the sun to the earth.
A prime number has exactly two divisors, one and itself; the number two is the only even one.
The moon turns once while it goes around the earth, so we always see the same side of it.
Sound travels faster in water than in air, and faster still in steel.
Iron rusts when it meets oxygen and water, which is why bridges are painted so often.
Bees tell each other where the flowers are by dancing in the dark of the hive.
A triangle with sides of three, four and five has a right angle.
Plants take carbon dioxide from the air and give back the oxygen that we breathe.
The heart of a blue whale is about as large as a small car.
Copper conducts electricity well, glass does not, and silicon can be taught to do either.
The average of a list is its sum divided by its length.
An index makes it quick to find a row, but every new row then takes a little longer to write.
A server waits for requests, answers them in some order, and should never lose one.
The scheduler picks the next batch, the model computes it, and the sampler chooses a token.
A cache keeps what was computed before, so that the same question costs less the second time.
Memory on the card holds the weights, the keys and values of every token, and a little space to work in.
The first token takes longer than the others because the whole prompt must be read before it.
When the queue is full, it is better to say so at once than to promise and then be silent.
Write the test first, watch it fail, and only then change the program.
A short function with a clear name is worth more than a long comment.
The error message should say what is wrong, which value was given, and what to do about it.
Please explain this step by step, and give a short example at the end.
Can you tell me what the capital of that country is, and how many people live there?
I would like to book a table for four people tomorrow evening at seven o'clock.
Translate the following sentence into French, German and Spanish.
Of course! Here is a summary of the article in three sentences.
I'm sorry, but I do not know the answer to that question.
Thank you very much for your help; it works now.
You are a helpful assistant. Answer in one short paragraph.
What's the difference between a list and a tuple? They're similar, but a tuple can't be changed.
Let's think about the problem: first we need to know the distance, then the speed.
The answer is 42, because 6 times 7 is 42.
In 2025 the prices rose by 3.5%, after 2.1% in 2024 and 8.0% in 2022.
Der schnelle Fuchs springt über den faulen Hund, und niemand wundert sich darüber.
La bibliothèque était fermée, alors nous avons pris un café près de la gare.
El niño soñó con un río de montaña y un pequeño barco de papel.
Grüße aus Köln, où il fait déjà très chaud, y donde la música nunca termina.
Привет, как дела? Сегодня хорошая погода, и мы идём гулять в парк.
今天天气很好，我们去公园散步吧。谢谢你的帮助！
こんにちは、元気ですか。明日は京都へ行きます。
안녕하세요, 오늘은 날씨가 좋네요.
Good morning ☀️! See you later 👋, and have fun 🎉🎉 — it'll be great… 😀
"""

CODE = '''\
def add(a: int, b: int) -> int:
    """Returns the sum of two numbers."""
    return a + b

def mean(values):
    if not values:
        raise ValueError("the list is empty")
    return sum(values) / len(values)

class Counter:
    def __init__(self, start=0):
        self.count = start

    def increment(self, step=1):
        self.count += step
        return self.count

for index, name in enumerate(["red", "green", "blue"]):
    print(f"{index}: {name}")

with open("data.txt", encoding="utf-8") as file:
    lines = [line.strip() for line in file if line.strip()]

const sum = (list) => list.reduce((total, item) => total + item, 0);
if (result !== null && result.length > 0) { console.log(result[0]); }
SELECT name, COUNT(*) FROM orders WHERE price > 10 GROUP BY name ORDER BY name;
{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}
{"type": "object", "properties": {"id": {"type": "integer"}, "tags": {"type": "array", "items": {"type": "string"}}}, "required": ["id"]}
{"id": 7, "ok": true, "message": null, "values": [1, 2.5, -3], "nested": {"a": false}}
# Heading

- first item
- second item with `code`

1. One
2. Two

| column | value |
|---|---|
| a | 1 |
'''

WORDS = {
    "who": "the teacher|a young doctor|my sister|the old gardener|our neighbour|the captain|a student|the baker|his friend|the engineer"
    "|a traveller|the writer|their daughter|the farmer|a stranger|the driver|the painter|her brother|the company|the committee",
    "did": "found|carried|described|forgot|remembered|bought|painted|followed|repaired|opened|wanted|explained|discovered|measured"
    "|borrowed|returned|watched|collected|ordered|finished|started|prepared|understood|noticed|brought|changed|considered",
    "what": "a broken chair|the blue notebook|an interesting problem|the last question|seven green apples|a letter from home"
    "|the second chapter|some warm clothes|a computer program|the wrong address|an old photograph|the important results"
    "|a different solution|the next station|enough water for everyone|a machine without a name|the number of people",
    "where": "in the kitchen|near the station|behind the house|on the other side of the street|at the university|under the bridge"
    "|between two mountains|in front of the theatre|at home|by the sea|in the middle of the city|inside the library|over the hills",
    "when": "yesterday|last week|in the morning|before dinner|after the meeting|during the summer|on Monday|at midnight|every year"
    "|in January|in the end|long ago|a few minutes later|for the first time|again|at the same time",
    "why": "because it was raining|so that nobody would worry|although it was difficult|without saying a word|because there was no time"
    "|while the others were sleeping|and everyone was surprised|but it did not matter|which was not easy|as usual|if possible",
}

TOPICS = (
    "about after against air although always another answer anything around ask available back become been before begin being believe "
    "best better between big body book both build business call can case certain change child city clear close color common complete "
    "condition consider contain continue control could country course create current data day decide deep describe design develop "
    "different direction discover distance does during early earth easy education effect energy enough even example experience explain "
    "face fact family far feel field figure final find fire first follow food force foreign form found free friend from full function "
    "future game general give good government great green group grow half hand happen hard have head health heard heat help high history "
    "hold hope hour house however human hundred idea important include increase industry information inside instead interest issue job "
    "just keep kind know knowledge language large last late law lead learn least left less letter level life light like line list little "
    "live local long look love low machine main make many mark material matter mean measure member mind minute model modern moment money "
    "month more morning most mother move much music must name nation nature near necessary need never new next night north nothing notice "
    "number object of often once only open order other over own page paper parent part particular party past pattern people perhaps "
    "period person picture piece place plan plant play point political poor position possible power practice present press pretty "
    "probably problem process produce product program project property protect provide public pull purpose question quick quite radio "
    "reach read ready real reason receive record remember report require research rest result return right river road rock room round "
    "rule same school science second section see seem sense sentence separate serve service set several shape share short should show "
    "side sign similar simple since single size small social some sound source south space speak special speed spend stand star start "
    "state station stay step still story street strong structure student study subject such sudden suggest support sure surface system "
    "table take talk teach technology temperature than that their them then theory there these thing think third thought through time "
    "together toward trade travel tree true turn type under understand unit until usually value various very view voice want war warm "
    "watch water wave weather week well west what wheel where whether which while white whole why wide will wind window winter with "
    "within without woman wonder word work world would write wrong year young"
).split()
ENDINGS = ("", "s", "ed", "ing", "er", "ly", "ment", "ness", "able")


def texts(seed: int = 0, count: int = 6000) -> Iterator[str]:
    """Documents for training: each sentence and piece of code many times, and `count` generated sentences."""
    rng = random.Random(seed)
    choices = {key: value.split("|") for key, value in WORDS.items()}
    for _ in range(8):
        yield from SENTENCES.splitlines(keepends=True)
        yield CODE
    for number in range(count):
        pick = {key: rng.choice(value) for key, value in choices.items()}
        yield (
            rng.choice(
                (
                    "{who} {did} {what} {where} {why}.",
                    "{when} {who} {did} {what}, and {who} {did} it {where}.",
                    "Why has {who} {did} {what} {when}? {why}!",
                    "The story says that {who} {did} {what} {when}.",
                )
            )
            .format(**pick)
            .capitalize()
            + "\n"
        )
        words = [rng.choice(TOPICS) + rng.choice(ENDINGS) for _ in range(6)]
        yield " ".join(words) + (f" {rng.randrange(10**4)}\n" if number % 3 else "\n")
