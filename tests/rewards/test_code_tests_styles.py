# ruff: noqa: E501
"""Tests that correct solutions score 1 and wrong solutions score 0 in all styles of tests."""

import pytest

from grpo_fast.data import Example
from grpo_fast.rewards import columns
from grpo_fast.rewards.workers import code_tests as worker
from grpo_fast.rewards.workers import unit_tests
from tests.rewards.test_code_tests import pytestmark  # noqa: F401

# For each style of unit tests: a correct solution, a wrong solution, and the tests.
STYLES = {
    "a function": (
        "def add(a, b): return a + b", "def add(a, b): return a - b",
        ["assert add(1, 2) == 3", "assert isinstance(add(1, 2), int) and add(2, 2) == 4"],
    ),
    "names of typing without an import": (
        "def add(xs: List[int], y: Optional[int] = None) -> int: return sum(xs)",
        "def add(xs: List[int]) -> List[int]: return xs", ["assert add([1, 2]) == 3"],
    ),
    "a check function": (
        "def add(a, b): return a + b", "def add(a, b): return 0",
        "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(2, 2) == 4\n"
        "check(add)",
    ),
    "asserts in statements": (
        "def half(x):\n    if x % 2: raise ValueError(x)\n    return x // 2", "def half(x): return x",
        ["for x in [2, 4]:\n    assert half(x) == x / 2", "if True:\n    assert half(2) == 1",
         "import unittest\ncase = unittest.TestCase()\nwith case.assertRaises(ValueError):\n    half(3)",
         "try:\n    half(1)\n    assert False\nexcept ValueError:\n    pass",
         "def check(x, y):\n    assert half(x) == y\nwhile True:\n    check(6, 3)\n    break",
         "if __name__ == '__main__':\n    check(8, 4)"],
    ),
    "statements that hide failures": (
        "def up(x):\n    assert x >= 0\n    return [x + 1]", "def up(x): return []",
        ["for y in up(1):\n    assert y == 2", "while up(1):\n    assert up(1) == [2]\n    break",
         "if up(1):\n    assert up(1) == [2]", "for x in up(1):\n    if x:\n        assert x == 2",
         "try:\n    assert up(1) == [2]\nexcept AssertionError:\n    print('failed')",
         "import contextlib\nwith contextlib.suppress(Exception):\n    assert up(1) == [2]",
         "try:\n    up(-1)\n    assert False\nexcept AssertionError:\n    pass"],
    ),
    "a check that says true": (
        "def add(a, b): return a + b", "def add(a, b): return 0",
        "def check(f):\n    seen = [f(1, 2)]\n    return seen == [3]\nassert check(add)",
    ),
    "a method as in LeetCode": (
        "class Solution:\n    def twoSum(self, nums, target):\n"
        "        seen = {}\n        for i, x in enumerate(nums):\n"
        "            if target - x in seen: return [seen[target - x], i]\n            seen[x] = i",
        "class Solution:\n    def twoSum(self, nums, target): return []",
        "def check(candidate):\n    assert candidate(nums=[2, 7, 11], target=9) == [0, 1]\n"
        "check(Solution().twoSum)",
    ),
    "a trie, whose methods judge": (
        "class Trie:\n    def __init__(self): self.words = set()\n"
        "    def insert(self, word): self.words.add(word)\n"
        "    def startswith(self, p): return any(w.startswith(p) for w in self.words)",
        "class Trie:\n    def insert(self, word): pass\n    def startswith(self, p): return 0",
        ["t = Trie()\nt.insert('apple')\nassert t.startswith('app') is True",
         "assert t.startswith('b') is False"],
    ),
    "errors": (
        "def root(x):\n    if x < 0: raise ValueError('negative')\n    return x ** 0.5",
        "def root(x): return 2.0 if x == 5 else -1",
        ["def fails():\n    try:\n        root(-1)\n    except ValueError as e:\n"
         "        return str(e) == 'negative'\nassert fails()", "assert root(4) == 2.0"],
    ),
    "errors of the answer's own": (
        "class Empty(LookupError):\n    def __init__(self, n):\n        super().__init__(f'no {n}')\n"
        "        self.n = n\nclass Worse(Empty): pass\ndef take(n): raise Worse(n)",
        "class Empty(LookupError): pass\ndef take(n): return n",
        "def check(f):\n    try:\n        f(3)\n        assert False\n    except Empty as error:\n"
        "        assert error.n == 3 and str(error) == 'no 3'\ncheck(take)\n"
        "def builtin(f):\n    try:\n        f(3)\n    except LookupError:\n        return\n"
        "    raise AssertionError\nbuiltin(take)",
    ),
    "an argument changed in place": (
        "def sort(a): a.sort()\ndef fill(grid, d, s):\n    grid[0][1] = 5\n    d['k'] = 1\n"
        "    s.add(2)",
        "def sort(a): return sorted(a)\ndef fill(grid, d, s): return grid",
        ["a = [3, 1]\nsort(a)\nassert a == [1, 3]",
         "g, d, s = [[0, 0]], {}, {1}\nfill(g, d, s=s)\nassert (g, d, s) == ([[0, 5]], {'k': 1}, {1, 2})",
         "b = [2, 1]\nassert sort(b) is None\nassert b == [1, 2]"],
    ),
    "helpers of the standard library": (
        "import collections, heapq, itertools, json, math, re, string\n"
        "from fractions import Fraction\nfrom decimal import Decimal\nimport datetime\n"
        "def words(t): return collections.Counter(re.findall(r'\\w+', t.lower()))\n"
        "def three(xs): return heapq.nsmallest(3, xs)\ndef third(): return Fraction(1, 3)\n"
        "def cents(x): return Decimal(x) / 100\ndef day(): return datetime.date(2024, 2, 29)\n"
        "def queue(xs): return collections.deque(xs)\n"
        "def groups(xs):\n    d = collections.defaultdict(list)\n"
        "    for x in xs: d[len(x)].append(x)\n    return d\n"
        "def pretty(x): return json.dumps(x)\ndef up(n): return math.factorial(n)",
        "def words(t): return {}\nthree = third = cents = day = queue = groups = pretty = up = words",
        ["import datetime\nfrom collections import Counter, deque\nfrom decimal import Decimal\n"
         "from fractions import Fraction\nassert words('a A b') == Counter('aab') == {'a': 2, 'b': 1}",
         "assert three([5, 1, 4, 2]) == [1, 2, 4]", "assert third() + third() == Fraction(2, 3)",
         "assert cents('150') == Decimal('1.5') == 1.5", "assert day() == datetime.date(2024, 2, 29)",
         "assert queue([1]) == deque([1])", "assert groups(['a', 'b', 'cc']) == {1: ['a', 'b'], 2: ['cc']}",
         "assert pretty({'a': [1]}) == '{\"a\": [1]}'", "assert up(3000) % 10**9 == 0 and up(20) > 2**61"],
    ),
    "every kind of plain data": (
        "def same(x): return x", "def same(x): return [x]",
        [f"assert same({value}) == {value} and type(same({value})) is type({value})" for value in
         ("None", "True", "2**80", "-1.5", "float('inf')", "1j", "'ü\\ud800'", "b'\\0'", "[]",
          "bytearray(b'a')", "()", "{1: {2, 3}}", "set()", "frozenset({1})", "range(1, 9, 2)",
          "[[1, (2, {'k': [3]})]]", "int", "ValueError")]
        + ["from datetime import *\nfor x in (date(2024, 2, 29), time(1, 2), timedelta(1, 5), datetime(1, 1, 1)):\n"
           "    assert same(x) == x", "x = float('nan')\nassert same(x) != same(x)"],
    ),
    "a class of the design kind": (
        "class Stack:\n    def __init__(self): self.items = []\n"
        "    def push(self, x):\n        self.items.append(x)\n        return self\n"
        "    def pop(self): return self.items.pop()\n    def size(self): return len(self.items)",
        "class Stack:\n    def push(self, x): pass\n    def pop(self): return None\n    def size(self): return -1",
        ["s = Stack()\ns.push(1)\ns.push(2)\nassert s.size() == 2", "assert s.pop() == 2 and Stack().size() == 0",
         "import pytest\nwith pytest.raises(IndexError):\n    Stack().pop()",
         "def make():\n    return Stack()\nt = make()\nt.push('a')\nassert t.pop() == 'a'"],
    ),
    "a class that is created with arguments": (
        "class Funds(Exception): pass\nclass Account:\n    def __init__(self, start): self.sum = start\n"
        "    def withdraw(self, x):\n        if x > self.sum: raise Funds('too little')\n        self.sum -= x\n"
        "    def balance(self): return self.sum",
        "class Funds(Exception): pass\nclass Account:\n    def __init__(self, start): pass\n"
        "    def withdraw(self, x): pass\n    def balance(self): return None",
        "import unittest\nfrom solution import Account, Funds\nclass TestAccount(unittest.TestCase):\n"
        "    def setUp(self):\n        self.a = Account(10)\n"
        "    def test_one(self):\n        self.a.withdraw(3)\n        self.assertEqual(self.a.balance(), 7)\n"
        "    def test_two(self):\n        with self.assertRaises(Funds) as caught:\n            self.a.withdraw(11)\n"
        "        self.assertIn('too', str(caught.exception))\n"
        "if __name__ == '__main__':\n    unittest.main()",
    ),
    "test functions of pytest": (
        "def half(x):\n    if x % 2: raise ValueError(f'odd: {x}')\n    return x / 2",
        "def half(x): return 0",
        "import pytest\nfrom solution import half as h\ndef test_value():\n    assert h(3 - 1) == 1\n"
        "def test_close():\n    assert h(2.0) == pytest.approx(1.0)\n"
        "def test_error():\n    with pytest.raises(ValueError, match='odd: 3'):\n        h(3)\n"
        "class TestHalf:\n    def test_inside(self):\n        assert h(8) == 4\n"
        "def test_form():\n    pytest.raises(ValueError, h, 1)",
    ),
    "numpy in the tests": (
        "def mean(xs): return sum(xs) / len(xs)", "def mean(xs): return 0",
        "import numpy as np\nfrom solution import mean\nassert np.isclose(mean([1, 2]), 1.5)\n"
        "assert np.allclose([mean([x]) for x in (1, 2)], np.array([1, 2]))",
    ),
    "a seed that the tests set": (
        "import random\ndef roll(): return random.randint(1, 6)", "def roll(): return 0",
        "import random\nfor seed in (1, 2, 3):\n    random.seed(seed)\n    expected = random.randint(1, 6)\n"
        "    random.seed(seed)\n    assert roll() == expected",
    ),
    "named tuples, iterators and values of subclasses": (
        "from typing import NamedTuple\nfrom enum import IntEnum\nfrom collections import defaultdict\n"
        "class P(NamedTuple):\n    x: int\n    y: int\nclass E(IntEnum):\n    ONE = 1\nclass L(list): pass\n"
        "def point(): return P(1, 2)\ndef one(): return E.ONE\ndef items(): return L([1])\n"
        "def groups(): return defaultdict(list, {1: [2]})\ndef up():\n    yield from range(3)\n"
        "def wave(): return map(abs, [-1, 2])",
        "point = one = items = groups = up = wave = lambda: None",
        ["assert isinstance(point(), tuple) and point() == (1, 2)", "assert one() == 1 and items() == [1]",
         "assert groups() == {1: [2]}", "assert list(up()) == [0, 1, 2]\nassert list(wave()) == [1, 2]",
         "it = up()\nassert next(it) == 0 and next(it) == 1"],
    ),
    "a builtin's name": (
        "def sum(a, b): return a + b", "def sum(a, b): return 0",
        ["assert sum(10, 15) == 25", "assert sum(1, 2) == 3"],
    ),
    "names that tests do not import": (
        "from collections import Counter, deque\nfrom math import inf\n"
        "def letters(t): return Counter(t)\ndef turn(q):\n    q.rotate(1)\n    return q\n"
        "def least(xs): return min(xs, default=inf)",
        "def letters(t): return {}\ndef turn(q): return None\nleast = letters",
        ["assert letters('aab') == Counter('aba')", "assert turn(deque([1, 2, 3])) == deque([3, 1, 2])",
         "assert least([]) == inf", "assert itertools.chain and list(letters(string.digits)) == list(string.digits)"],
    ),
    "inputs and outputs as text": (
        "print(int(input()) + 1)", "print(1)",
        '{"inputs": ["1", "2"], "outputs": ["2", "3"]}',
    ),
    "a module's name": (
        "def calendar(n): return n + 1", "def calendar(n): return n",
        ["assert calendar(1) == 2"],
    ),
    "a program": (
        "n = int(input())\nprint(sum(int(input()) for _ in range(n)))\nexit()", "print(0)",
        [{"input": "2\n3\n4\n", "output": "7\n"}, {"input": "1\n5", "output": "5"}],
    ),
    "a program that reads all of stdin": (
        "import sys\ndef main():\n    a, b = map(int, sys.stdin.read().split())\n"
        "    sys.stdout.write(f'{a}\\n{b}  \\n\\n')\n    sys.exit()\n"
        "if __name__ == '__main__':\n    main()",
        "if __name__ == '__main__':\n    raise ValueError",
        {"inputs": ["1 2", "3 4\n"], "outputs": ["1\n2", "3\n4\n"]},
    ),
    "a program of bytes": (
        "import os\nwhile part := os.read(0, 9): os.write(1, part.upper())", "import os\nos._exit(0)",
        [{"input": "ü a\n" * 30000, "output": "ü A\n" * 30000}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("style", STYLES)
def test_a_right_solution_scores_one_and_a_wrong_one_nothing(style):
    right, wrong, tests = STYLES[style]
    scores = worker.code_tests(completions=[right, wrong], tests=[tests] * 2, seconds=20.0)
    assert scores == [1.0, 0.0]


# Tests that need more than plain data and methods of one object. They are refused when the data are
# read, because they would give every answer the reward 0.
REFUSED = [
    "assert V(1, 2) + V(3, 4) == V(4, 6)", "assert V(1) == V(2)", "assert Point(1).y == 2",
    "s = Stack()\ns.push(1)\nassert len(s) == 1", "s = Stack()\ns.push(1)\nassert s.items == [1]",
    "c = LRU()\nc.put('a', 1)\nassert c['a'] == 1", "c = LRU()\nc.put(1)\nassert 1 in c",
    "t = Table()\nt.fill()\nwith t as u:\n    assert u", "b = Box()\nb.x = 3\nassert b.get() == 3",
    "b = Box()\nb.put(1)\nfor x in b:\n    assert x", "a = B()\na.put(1)\nassert a == B()",
    "n = build([1])\nassert n.next.value == 2", "assert LIMIT['a'] == 1", "assert Color.RED.value == 1",
    "assert is_balanced(root)", "assert compose(len, abs)(3) == 4", "assert apply(lambda x: x, [1]) == [1]",
    "assert apply(len, ['a']) == [1]", "def g(x): return x\nassert apply(g, [1]) == [1]",
    "assert apply(other, [1]) == [1]", "assert adder(1)(2) == 3", "s = S()\nassert s.push(1).peek() == 1",
    "class Node: pass\nassert depth(Node()) == 1", "import pandas\nassert f(1) == 2",
    "import requests\nassert f(1) == 2", "from unittest.mock import patch\nassert f(1) == 2",
    "from unittest import mock\nassert f(1) == 2", "import asyncio\nassert asyncio.run(f(1)) == 2",
    "async def test_a():\n    assert await f(1) == 2", "def test_out(capsys):\n    assert f(1) == 2",
    "import numpy as np\nassert f(np.array([1])) == 1",     "import io\nfrom contextlib import redirect_stdout\nwith redirect_stdout(io.StringIO()):\n    assert f(1) == 2",
    "assert isinstance(make(), Shape)", "assert make().area == 2", "from heapq import *\nassert f(1) == 2",
]  # fmt: skip


@pytest.mark.parametrize("tests", REFUSED)
def test_tests_that_need_more_are_refused(tests):
    with pytest.raises(ValueError, match="tests: expected what the table in the README"):
        unit_tests.check(tests)


HUMANEVAL = 'import math\n\ndef poly(xs, x):\n    return sum(c * x**i for i, c in enumerate(xs))\n\n\ndef zero(xs):\n    """ Find x.\n    """\n'
PUBLISHED = {
    "MBPP": (
        {"task_id": 2, "text": "…", "code": "…", "test_setup_code": "", "test_list": [
            "assert add(1, 2) == 3", "assert add(2, 2) == 4"], "challenge_test_list": []},
        "def add(a, b): return a + b", "def add(a, b): return 0",
    ),
    "MBPP, sanitized": (
        {"test_imports": ["import math"], "test_list": [
            "assert math.isclose(area(1), math.pi)", "assert math.isclose(area(2), 4 * math.pi)"]},
        "import math\ndef area(r): return math.pi * r * r", "def area(r): return 0",
    ),
    "HumanEval, with a helper in the prompt": (
        {"prompt": HUMANEVAL, "entry_point": "zero", "test": "\n\nMETADATA = {}\n\n\ndef check(candidate):\n"
         "    import math, random, copy\n    rng = random.Random(42)\n    for _ in range(9):\n"
         "        xs = [rng.randint(1, 9), 1]\n        x = candidate(copy.deepcopy(xs))\n"
         "        assert math.fabs(poly(xs, x)) < 1e-4\n\n"},
        "def zero(xs): return -xs[0] / xs[1]", "def poly(xs, x): return 0\ndef zero(xs): return 0",
    ),
    "HumanEval, with the name of a library": (
        {"prompt": "def median(l: list):\n    pass", "entry_point": "median", "test":
         "def check(candidate):\n    assert candidate([3, 1, 2]) == 2\n    assert abs(candidate([1.0]) - sqrt(1)) < 1e-6"},
        "def median(l): return sorted(l)[len(l) // 2]", "def median(l): return 0",
    ),
    "LeetCode": (
        {"entry_point": "Solution().reverse", "test": "def check(candidate):\n    assert candidate(x = 123) == 321\n"},
        "class Solution:\n    def reverse(self, x): return int(str(x)[::-1])",
        "class Solution:\n    def reverse(self, x): return x",
    ),
    "KodCode": (
        {"test": "from solution import is_even\n\ndef test_two():\n    assert is_even(2) is True\n\n"
         "def test_three():\n    assert not is_even(3)\n    assert is_even(4)\n"},
        "def is_even(n): return n % 2 == 0", "def is_even(n): return None",
    ),
    "APPS": (
        {"input_output": '{"inputs": ["1\\n", "2\\n"], "outputs": ["2\\n", "3\\n"]}', "starter_code": ""},
        "print(int(input()) + 1)", "print(4)",
    ),
    "APPS, a function": (
        {"input_output": {"fn_name": "add", "inputs": [[1, 2], [2, 2]], "outputs": [3, [4]]}},
        "def add(a, b): return a + b", "def add(a, b): return 0",
    ),
    "APPS, a method": (
        {"input_output": '{"fn_name": "add", "inputs": [[1, [2]]], "outputs": [[3, 4]]}',
         "starter_code": "class Solution:\n    def add(self, a, b):"},
        "class Solution:\n    def add(self, a, b): return [3, 4]", "class Solution:\n    def add(self, a, b): return 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_rows_of_published_data_sets_are_read(name):
    fields, right, wrong = PUBLISHED[name]
    others = {key: value for key, value in fields.items() if key != "prompt"}
    tests = columns.tests_of(Example(fields.get("prompt", "Write it."), None, None, others))
    unit_tests.check(tests)
    scores = worker.code_tests(completions=[right, wrong], tests=[tests] * 2, seconds=20.0)
    assert scores == [1.0, 0.0]
