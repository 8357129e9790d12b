# ruff: noqa: E501
"""Tests that correct solutions score 1 and wrong solutions score 0 in all styles of tests."""

import pytest

from grpo_fast.rewards.workers import code_tests as worker
from tests.rewards.test_code_tests import pytestmark  # noqa: F401

# For each style of unit tests: a correct solution, a wrong solution, and the tests.
STYLES = {
    "a function": (
        "def add(a, b): return a + b", "def add(a, b): return a - b",
        ["assert add(1, 2) == 3", "assert isinstance(add(1, 2), int) and add(2, 2) == 4"],
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
    "a class": (
        "class Stack:\n    def __init__(self): self.items = []\n"
        "    def push(self, x): self.items.append(x)\n    def pop(self): return self.items.pop()\n"
        "    def __len__(self): return len(self.items)",
        "class Stack:\n    items = []\n    def push(self, x): pass\n    def pop(self): return None\n"
        "    def __len__(self): return -1",
        ["s = Stack()\ns.push(1)\ns.push(2)\nassert len(s) == 2", "assert s.pop() == 2",
         "assert s.items == [1] and isinstance(s, Stack)"],
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
    "operators of a class": (
        "class V:\n    def __init__(self, x, y): self.x, self.y = x, y\n"
        "    def __add__(self, o): return V(self.x + o.x, self.y + o.y)\n"
        "    def __mul__(self, k): return V(self.x * k, self.y * k)\n    __rmul__ = __mul__\n"
        "    def __eq__(self, o): return (self.x, self.y) == (o.x, o.y)\n"
        "    def __repr__(self): return f'V({self.x}, {self.y})'",
        "class V:\n    def __init__(self, x, y): self.x = self.y = 0\n"
        "    def __add__(self, o): return self\n    def __mul__(self, k): return self\n"
        "    __rmul__ = __mul__\n    def __eq__(self, o): return False",
        ["assert V(1, 2) + V(3, 4) == V(4, 6)", "assert 2 * V(1, 2) == V(2, 4)",
         "assert (V(1, 2) * 3).y == 6", "assert repr(V(1, 2)) == 'V(1, 2)'"],
    ),
    "a dataclass, an enum and a named tuple": (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from enum import Enum\nfrom typing import NamedTuple\n"
        "@dataclass\nclass Point:\n    x: int\n    y: int = 2\n"
        "class Color(Enum):\n    RED = 1\nclass Pair(NamedTuple):\n    a: int\n    b: int\n"
        "def pair(): return Pair(1, 2)",
        "class Point:\n    def __init__(self, *a): self.x = self.y = 0\nColor = pair = Point",
        ["assert Point(1).y == 2", "assert Point(1) == Point(1, 2) and Point(1) != Point(2)",
         "assert Color.RED.value == 1 and Color(1) is Color.RED",
         "assert pair() == (1, 2)\nassert pair().b == 2"],
    ),
    "deleted attributes": (
        "class Box:\n    def __init__(self): self.x = 1\n    @property\n    def y(self): return 2",
        "class Box:\n    x = 1\n    def __delattr__(self, name): pass",
        ["box = Box()\ndel box.x\nassert not hasattr(box, 'x')",
         "def fails():\n    try:\n        del Box().y\n    except AttributeError:\n"
         "        return True\nassert fails()"],
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
         "g, d, s = [[0, 0]], {}, {1}\nrow = g[0]\nfill(g, d, s)\n"
         "assert (g, d, s) == ([[0, 5]], {'k': 1}, {1, 2}) and row is g[0]",
         "b = [2, 1]\nassert sort(b) is None\nassert b == [1, 2]"],
    ),
    "a generator": (
        "def count(n):\n    for i in range(n): yield i * i\n"
        "def naturals():\n    i = 0\n    while True:\n        yield i\n        i += 1",
        "def count(n): return iter(())\ndef naturals(): return iter([5])",
        ["assert list(count(4)) == [0, 1, 4, 9]", "assert sum(count(3)) == 5",
         "it = naturals()\nassert [next(it), next(it)] == [0, 1]", "assert 4 in count(4)"],
    ),
    "closures and functions as arguments": (
        "def compose(f, g): return lambda x: f(g(x))\ndef apply(f, xs): return [f(x) for x in xs]\n"
        "def counter():\n    n = 0\n    def up():\n        nonlocal n\n        n += 1\n"
        "        return n\n    return up",
        "def compose(f, g): return f\ndef apply(f, xs): return xs\n"
        "def counter(): return lambda: 0",
        ["assert compose(lambda x: x + 1, abs)(-3) == 4", "assert apply(len, ['a', 'bb']) == [1, 2]",
         "up = counter()\nup()\nassert up() == 2", "assert apply(lambda x: -x, [1]) == [-1]"],
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
        "def same(x): return x\nLIMIT = {'a': (1, None)}",
        "def same(x): return [x]\nLIMIT = 0",
        [f"assert same({value}) == {value} and type(same({value})) is type({value})" for value in
         ("None", "True", "2**80", "-1.5", "float('inf')", "1j", "'ü\\ud800'", "b'\\0'", "[]",
          "bytearray(b'a')", "()", "{1: {2, 3}}", "set()", "frozenset({1})", "range(1, 9, 2)",
          "[[1, (2, {'k': [3]})]]")]
        + ["assert LIMIT['a'] == (1, None)", "x = float('nan')\nassert same(x) != same(x)"],
    ),
    "a subclass of a builtin": (
        "class Bag(list):\n    def total(self): return sum(self)\n"
        "class LRU(dict):\n    def put(self, k, v): self[k] = v",
        "class Bag(list):\n    total = None\nclass LRU(dict):\n    def put(self, k, v): pass",
        ["b = Bag([1, 2])\nb.append(3)\nassert b.total() == 6", "c = LRU()\nc.put('a', 1)\nassert c == {'a': 1} and 'a' in c and c['a'] == 1"],
    ),
    "a linked list": (
        "class Node:\n    def __init__(self, value, next=None):\n"
        "        self.value, self.next = value, next\n"
        "def build(xs):\n    head = None\n    for x in reversed(xs): head = Node(x, head)\n"
        "    return head",
        "class Node: pass\ndef build(xs): return None",
        ["n = build([1, 2])\nassert (n.value, n.next.value, n.next.next) == (1, 2, None)",
         "n.value = 7\nassert n.value == 7"],
    ),
    "iteration, keys and contexts of a class": (
        "class Table:\n    def __init__(self): self.d, self.open = {}, False\n"
        "    def __setitem__(self, k, v): self.d[k] = v\n    def __getitem__(self, k): return self.d[k]\n"
        "    def __delitem__(self, k): del self.d[k]\n    def __iter__(self): return iter(self.d)\n"
        "    def __contains__(self, k): return k in self.d\n"
        "    def __enter__(self):\n        self.open = True\n        return self\n"
        "    def __exit__(self, *error): self.open = False",
        "class Table(dict):\n    def __setitem__(self, k, v): pass",
        ["t = Table()\nt['a'] = 1\nassert t['a'] == 1 and 'a' in t and list(t) == ['a']",
         "with t as same:\n    assert same.open and t.open\nassert not t.open",
         "t['b'] = 2\ndel t['a']\nassert 'a' not in t and 'b' in t"],
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
    "a well-known class as the task": (
        "class Fraction:\n    def __init__(self, a, b): self.a, self.b = a, b\n"
        "    def __eq__(self, o): return self.a * o.b == o.a * self.b",
        "", ["assert Fraction(1, 2) == Fraction(2, 4)", "assert Fraction(3, 4).b == 4"],
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
