"""What is written to and cut: prompts in many languages and forms, passages that people wrote, and a file to edit.

The passages are in the public domain: Austen, Carroll, Dickens, Melville, Lincoln; Kafka, Voltaire, Tolstoy, Natsume,
Lu Xun.
"""

from __future__ import annotations

__all__ = ["EDITED", "EDIT_TASK", "FILE", "KINDS", "NOISE_WORDS", "PASSAGES"]

KINDS = {
    "prose": "The ferry left the harbour an hour late, and by the time it reached the island the",
    "essay": "There are three reasons why small libraries matter more than large ones. First,",
    "Python": 'class RingBuffer:\n    """Forgets its oldest entries."""\n\n    def __init__(self, capacity):\n',
    "Rust": "/// Counts the words of a text.\npub fn count_words(text: &str) -> HashMap<String, usize> {\n",
    "table": "| Element | Symbol | Atomic number | Melting point |\n|---|---|---|---|\n| Iron | Fe | 26 | 1538 °C |\n",
    "JSON": '{"order": 48213, "customer": {"name": "Grace Hopper", "city": "Arlington"}, "items": [{"sku": "A-113", ',
    "URLs and numbers": "Sources:\n- https://www.example.org/archive/1998/07/report-0041.html (3,417 visits)\n- https://",
    "German": "Die Geschichte der Eisenbahn in Süddeutschland beginnt mit einer kurzen Strecke, auf der",
    "French": "Pour préparer une bonne soupe à l'oignon, il faut d'abord éplucher",
    "Russian": "Зимой на берегу озера почти никого не бывает. Старый рыбак",
    "Chinese": "这座城市的老图书馆建于一百年前，里面收藏了",
    "Japanese": "朝早く起きて山に登ると、頂上からは",
}
"""A beginning of each kind of text."""

NOISE_WORDS = ("anchor", "basket", "candle", "drawer", "ember", "feather", "granite", "hollow", "island", "jacket")

PASSAGES = {
    "English": (
        "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of "
        "a wife. However little known the feelings or views of such a man may be on his first entering a "
        "neighbourhood, this truth is so well fixed in the minds of the surrounding families, that he is considered "
        "as the rightful property of some one or other of their daughters. \"My dear Mr. Bennet,\" said his lady to "
        "him one day, \"have you heard that Netherfield Park is let at last?\" Mr. Bennet replied that he had not. "
        "\"But it is,\" returned she; \"for Mrs. Long has just been here, and she told me all about it.\" Mr. Bennet "
        "made no answer. \"Do not you want to know who has taken it?\" cried his wife impatiently. \"You want to tell "
        "me, and I have no objection to hearing it.\" This was invitation enough.",
        "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once "
        "or twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it, "
        "\"and what is the use of a book,\" thought Alice, \"without pictures or conversations?\" So she was "
        "considering in her own mind (as well as she could, for the hot day made her feel very sleepy and stupid), "
        "whether the pleasure of making a daisy-chain would be worth the trouble of getting up and picking the "
        "daisies, when suddenly a White Rabbit with pink eyes ran close by her. There was nothing so very remarkable "
        "in that; nor did Alice think it so very much out of the way to hear the Rabbit say to itself, \"Oh dear! Oh "
        "dear! I shall be too late!\" But when the Rabbit actually took a watch out of its waistcoat-pocket, and "
        "looked at it, and then hurried on, Alice started to her feet.",
        "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, "
        "it was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season of "
        "Darkness, it was the spring of hope, it was the winter of despair, we had everything before us, we had "
        "nothing before us, we were all going direct to Heaven, we were all going direct the other way. There were a "
        "king with a large jaw and a queen with a plain face, on the throne of England; there were a king with a large "
        "jaw and a queen with a fair face, on the throne of France. In both countries it was clearer than crystal to "
        "the lords of the State preserves of loaves and fishes, that things in general were settled for ever.",
        "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse, and "
        "nothing particular to interest me on shore, I thought I would sail about a little and see the watery part of "
        "the world. It is a way I have of driving off the spleen and regulating the circulation. Whenever I find "
        "myself growing grim about the mouth; whenever it is a damp, drizzly November in my soul; whenever I find "
        "myself involuntarily pausing before coffin warehouses, and bringing up the rear of every funeral I meet; and "
        "especially whenever my hypos get such an upper hand of me, that it requires a strong moral principle to "
        "prevent me from deliberately stepping into the street, and methodically knocking people's hats off, then, I "
        "account it high time to get to sea as soon as I can.",
        "Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in "
        "Liberty, and dedicated to the proposition that all men are created equal. Now we are engaged in a great civil "
        "war, testing whether that nation, or any nation so conceived and so dedicated, can long endure. We are met on "
        "a great battle-field of that war. We have come to dedicate a portion of that field, as a final resting place "
        "for those who here gave their lives that that nation might live. It is altogether fitting and proper that we "
        "should do this. But, in a larger sense, we can not dedicate, we can not consecrate, we can not hallow this "
        "ground. The brave men, living and dead, who struggled here, have consecrated it, far above our poor power to "
        "add or detract. The world will little note, nor long remember what we say here, but it can never forget what "
        "they did here.",
    ),
    "German": (
        "Als Gregor Samsa eines Morgens aus unruhigen Träumen erwachte, fand er sich in seinem Bett zu einem "
        "ungeheueren Ungeziefer verwandelt. Er lag auf seinem panzerartig harten Rücken und sah, wenn er den Kopf ein "
        "wenig hob, seinen gewölbten, braunen, von bogenförmigen Versteifungen geteilten Bauch, auf dessen Höhe sich "
        "die Bettdecke, zum gänzlichen Niedergleiten bereit, kaum noch erhalten konnte. Seine vielen, im Vergleich zu "
        "seinem sonstigen Umfang kläglich dünnen Beine flimmerten ihm hilflos vor den Augen. »Was ist mit mir "
        "geschehen?«, dachte er. Es war kein Traum. Sein Zimmer, ein richtiges, nur etwas zu kleines Menschenzimmer, "
        "lag ruhig zwischen den vier wohlbekannten Wänden.",
    ),
    "French": (
        "Il y avait en Westphalie, dans le château de monsieur le baron de Thunder-ten-tronckh, un jeune garçon à qui "
        "la nature avait donné les mœurs les plus douces. Sa physionomie annonçait son âme. Il avait le jugement assez "
        "droit, avec l'esprit le plus simple; c'est, je crois, pour cette raison qu'on le nommait Candide. Monsieur le "
        "baron était un des plus puissants seigneurs de la Westphalie, car son château avait une porte et des "
        "fenêtres. Sa grande salle même était ornée d'une tapisserie.",
    ),
    "Russian": (
        "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему. Все смешалось в "
        "доме Облонских. Жена узнала, что муж был в связи с бывшею в их доме француженкою-гувернанткой, и объявила "
        "мужу, что не может жить с ним в одном доме. Положение это продолжалось уже третий день и мучительно "
        "чувствовалось и самими супругами, и всеми членами семьи, и домочадцами.",
    ),
    "Japanese": (
        "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。何でも薄暗いじめじめした所でニャーニャー泣いていた事だけは記憶"
        "している。吾輩はここで始めて人間というものを見た。しかもあとで聞くとそれは書生という人間中で一番獰悪な種族であったそうだ。この書生"
        "というのは時々我々を捕えて煮て食うという話である。しかしその当時は何という考もなかったから別段恐しいとも思わなかった。",
    ),
    "Chinese": (
        "我冒了严寒，回到相隔二千余里，别了二十余年的故乡去。时候既然是深冬；渐近故乡时，天气又阴晦了，冷风吹进船舱中，呜呜的响，从篷隙向"
        "外一望，苍黄的天底下，远近横着几个萧索的荒村，没有一些活气。我的心禁不住悲凉起来了。阿！这不是我二十年来时时记得的故乡？我所记得的"
        "故乡全不如此。我的故乡好得多了。但要我记起他的美丽，说出他的佳处来，却又没有影像，没有言辞了。",
    ),
}  # fmt: skip
"""By language."""

FILE = '''"""A small stock of goods, kept in memory."""

from dataclasses import dataclass, field


@dataclass
class Item:
    """One kind of goods."""

    name: str
    price_cents: int
    quantity: int = 0


@dataclass
class Stock:
    """All goods, by name."""

    items: dict[str, Item] = field(default_factory=dict)

    def add(self, name: str, price_cents: int, quantity: int) -> Item:
        """Add goods; a known name only grows."""
        item = self.items.get(name)
        if item is None:
            item = Item(name, price_cents)
            self.items[name] = item
        item.quantity += quantity
        return item

    def take(self, name: str, quantity: int) -> int:
        """Take goods out; return how many there were."""
        item = self.items[name]
        taken = min(quantity, item.quantity)
        item.quantity -= taken
        return taken

    def worth_cents(self) -> int:
        """Return what everything is worth together."""
        return sum(item.price_cents * item.quantity for item in self.items.values())

    def shortages(self, least: int) -> list[str]:
        """Return the names of goods of which fewer than `least` are left."""
        return sorted(item.name for item in self.items.values() if item.quantity < least)


def report(stock: Stock) -> str:
    """Describe the stock, a line for each kind of goods."""
    lines = []
    for item in stock.items.values():
        lines.append(f"{item.name}: {item.quantity} at {item.price_cents / 100:.2f}")
    lines.append(f"total: {stock.worth_cents() / 100:.2f}")
    return "\\n".join(lines)


if __name__ == "__main__":
    stock = Stock()
    stock.add("lamp", 1999, 4)
    stock.add("rope", 350, 12)
    stock.take("lamp", 1)
    print(report(stock))
'''
"""A file of 60 lines."""

EDITED = FILE.replace("worth_cents", "total_cents")
"""The file with the one change that `EDIT_TASK` asks for."""

EDIT_TASK = (
    f"Here is stock.py:\n\n```python\n{FILE}```\n\n"
    "The same file, with `worth_cents` renamed to `total_cents`:\n\n```python\n"
)
