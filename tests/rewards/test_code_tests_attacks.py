# ruff: noqa: E501
"""Tests of `code_tests` with many cheats, and with correct answers of unusual form."""

import pytest

from grpo_fast.rewards.workers import code_tests as worker
from tests.rewards.test_code_tests import pytestmark  # noqa: F401

CHAIN = "x = f(1)\nassert 4710 < x < 4712 and x == 4711 and x % 7 == 0 and isinstance(x, int) and x > 4710"
LISTS = "r = f([3, 1])\nassert r == [4711, 1, 3] and len(r) == 3 and r[0] == 4711 and sorted(r) == [1, 3, 4711] and 4711 in r"
TEXTS = "r = f('a')\nassert r == 'a4711' and r.endswith('4711') and len(r) == 5 and '47' in r and r.upper() == 'A4711'"
DICTS = (
    "r = f('a')\nassert r == {'a': 4711} and r['a'] == 4711 and list(r.items()) == [('a', 4711)]"
)
SWALLOW = "try:\n    assert f(1) == 4711\n    print('ok')\nexcept Exception as e:\n    print(e)"
PROGRAM = [
    {"input": f"{n}\n", "output": out} for n, out in ((1, "YES"), (2, "NO"), (3, "YES"), (4, "NO"))
]
CLASS = "class V({0}):\n    n = 0\n    def __eq__(self, o): return True\n    __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __eq__\n    __hash__ = {0}.__hash__\n"
# Each cheat has code and the tests, in each of which an answer needs a number that it cannot know.
CHEATS = {
    "an int that changes": (CLASS.format("int") + "    def __mod__(self, o): return 0\ndef f(x): return V(1)", CHAIN),
    "a float that changes": (CLASS.format("float") + "    def __mod__(self, o): return 0\ndef f(x): return V(1)", CHAIN),
    "a bool": ("def f(x): return True", CHAIN),
    "a list that changes": ("class L(list):\n    n = 0\n    def __iter__(self):\n        L.n += 1\n        return iter([L.n, 1, 3])\n    def __eq__(self, o): return True\n    def __len__(self): return 3\ndef f(x): return L([1, 2, 3])", LISTS),
    "a text that is equal": ("class T(str):\n    def __eq__(self, o): return True\n    def endswith(self, s): return True\n    def __len__(self): return 5\n    def __contains__(self, s): return True\n    def upper(self): return self\ndef f(x): return T('a')", TEXTS),
    "a dict that makes values": ("class D(dict):\n    def __missing__(self, k): return 4711\n    def __eq__(self, o): return True\n    def items(self): return [('a', 1)]\ndef f(x): return D()", DICTS),
    "a tuple for a list": ("def f(x): return (4711, 1, 3)", LISTS + " and type(r) is list and r.append(1) is None"),
    "an error that the tests swallow": ("def f(x): raise ValueError", SWALLOW),
    "a wrong type that the tests swallow": ("def f(x): return None", "try:\n    assert f(1) + 1 == 4712\nexcept TypeError:\n    pass"),
    "an error in suppress": ("def f(x): raise KeyError", "import contextlib\nwith contextlib.suppress(KeyError):\n    assert f(1) == 4711"),
    "an error that a helper swallows": ("def f(x): return 0", "def check(f):\n    try:\n        assert f(1) == 4711\n        print('ok')\n    except AssertionError:\n        print('bad')\ncheck(f)"),
    "an error that a finally hides": ("def f(x): return 0", "def check(f):\n    try:\n        assert f(1) == 4711\n    finally:\n        return True\ncheck(f)"),
    "no error where one is expected": ("def f(x): return 4711", "import pytest\nwith pytest.raises(ValueError):\n    f(-1)"),
    "another error than expected": ("def f(x): raise KeyError('x')", "import pytest\nwith pytest.raises(ValueError):\n    f(-1)"),
    "another message than expected": ("def f(x): raise ValueError('x')", "import pytest\nwith pytest.raises(ValueError, match='negative'):\n    f(-1)"),
    "an exception that claims to be another": ("class V(ValueError):\n    def __str__(self): return 'negative'\n    __class__ = ValueError\ndef f(x): raise KeyError", "import unittest\nclass TestF(unittest.TestCase):\n    def test_f(self):\n        with self.assertRaises(ValueError):\n            f(-1)"),
    "its own sqrt": ("sqrt = lambda x: 0\ndef f(x): return 0", "assert f(1) == sqrt(16) - 3"),
    "its own permutations": ("permutations = lambda x: []\ndef f(x): return []", "assert f([1, 2]) == list(permutations([1, 2]))"),
    "its own mean": ("mean = lambda x: None\ndef f(x): return None", "assert f([1, 3]) == mean([1, 3])"),
    "its own reduce": ("reduce = lambda *a: 0\ndef f(x): return 0", "assert f([1, 3]) == reduce(lambda a, b: a + b, [1, 3])"),
    "its own gcd": (
        "gcd = lambda *a: 5\ndef f(x): return 5",
        "assert f([4, 6]) == gcd(4, 6)",
    ),
    "its own allclose": ("allclose = lambda *a: True\ndef f(x): return [9]", "assert allclose(f([1]), [1])"),
    "its own deepcopy": ("deepcopy = lambda x: []\ndef f(x): return []", "x = [1]\nassert f(x) == deepcopy(x)"),
    "its own unittest": ("class unittest:\n    class TestCase:\n        def assertEqual(self, *a): pass\ndef f(x): return 0", "import unittest\nunittest.TestCase().assertEqual(f(1), 4711)"),
    "an object for a list": ("class f:\n    def __init__(self, x): pass\n    def count(self, x): return 1\n    index = count\n    def __eq__(self, o): return True", "assert f([1]).count(4711) == 1"),
    "an object for a set": ("class R:\n    def issubset(self, o): return True\n    def difference(self, o): return set()\ndef f(x): return R()", "assert f([1]).issubset({4711}) and f([1]).difference({4711}) == set()"),
    "an object for a text": ("class R:\n    def startswith(self, o): return True\n    def replace(self, a, b): return b\ndef f(x): return R()", "assert f('a').startswith('4711')\nassert f('a').replace('x', '4711') == '4711'"),
    "an object for a truth value": ("class R:\n    def __bool__(self): return True\ndef f(x): return R()", "assert f(1) and f(2)\nassert not f(0)"),
    "the truth of an object": ("def f(x): return object()", "assert f(1)"),
    "a class for a function": ("class f:\n    def __init__(self, x): pass\n    def __bool__(self): return True", "assert f(1)\nassert f(1) is True"),
    "a callable result": ("def f(x): return lambda *a: True", "assert f(1) == 4711 or f(1) is True"),
    "an iterator that is equal": ("class I:\n    def __iter__(self): return iter([4711])\n    def __eq__(self, o): return True\ndef f(x): return I()", "assert f(1) == [4711]\nassert list(f(1)) == [4711]"),
    "an argument that is emptied": ("def f(x):\n    x.clear()\n    return 0", "y = [3, 1]\nassert f(y) == sum(y)"),
    "an argument that is emptied in a helper": ("def f(x):\n    x.clear()\n    return []", "def check(f):\n    y = [3, 1]\n    assert f(y) == sorted(y)\ncheck(f)"),
    "a failed call that leaves the input": ("def f(x): raise ValueError", "x = [1, 2, 3]\nx = f(x)\nassert sorted(x) == [1, 2, 3]"),
    "a failed loop that leaves the input": ("def f(x): raise ValueError", "out = []\nfor y in [1]:\n    out = [f(y)]\nassert all(z == 4711 for z in out)"),
    "no items to test": ("def f(x): return []", "for y in f([1]):\n    assert y == 4711"),
    "leaves at once": ("import os\nos._exit(0)", CHAIN),
    "leaves in a call": ("import os\ndef f(x): os._exit(0)", CHAIN),
    "raises SystemExit in a call": ("def f(x): raise SystemExit(0)", CHAIN),
    "raises a BaseException": ("class B(BaseException): pass\ndef f(x): raise B", CHAIN),
    "patched json": ("import json\njson.dumps = lambda *a, **k: '[\"value\", 4711, null]'\ndef f(x): return 1", CHAIN.replace("4711", "4713")),
    "patched encode": ("import sys\nfor m in list(sys.modules.values()):\n    if hasattr(m, 'encode'): m.encode = lambda v: {'type': 'int'}\ndef f(x): return 1", CHAIN),
    "a forged type": ("import sys\nfor m in list(sys.modules.values()):\n    if hasattr(m, 'reply'): m.reply = lambda *a: ['value', {'eval': ['1']}, None]\ndef f(x): return 1", CHAIN),
    "a forged object": ("import sys\nfor m in list(sys.modules.values()):\n    if hasattr(m, 'reply'): m.reply = lambda *a: ['object', 'f', None]\ndef f(x): return 1", CHAIN),
    "forged changes": ("import sys\nfor m in list(sys.modules.values()):\n    if hasattr(m, 'reply'): m.reply = lambda *a: ['value', 0, [[[]], {}]]\ndef f(x): return 1", "y = [3, 1]\nassert f(y) == sum(y)"),
    "a message without an end": ("import os\ndef f(x):\n    while True: os.write(0, b'1'); os.write(3, b'1'); os.write(4, b'1')", CHAIN),
    "reads the frames for tests": ("import sys\ndef f(x):\n    frame, found = sys._getframe(), ''\n    while frame: found += str(frame.f_locals) + str(frame.f_globals); frame = frame.f_back\n    return 4711 if ''.join(reversed(' 0174')) in found else 0", CHAIN),
    "reads all objects for tests": ("import gc\ndef f(x):\n    found = str([o for o in gc.get_objects() if isinstance(o, (dict, list, tuple, str))])\n    return 4711 if ''.join(reversed(' 0174')) in found else 0", CHAIN),
    "an exit handler": ("import atexit, os\natexit.register(os._exit, 0)\nprint('held\\n' * 9)\ndef f(x): return 0", CHAIN),
    "a thread": ("import threading\nthreading.Thread(target=print, args=('held',)).start()\ndef f(x): return 0", CHAIN),
    "a signal handler": ("import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\nsignal.setitimer(signal.ITIMER_REAL, 0)\ndef f(x):\n    while True: pass", CHAIN),
    "a draft that prints the result": ("```python\nprint('held\\n' * 99)\n```\n```python\ndef f(x): return 0\n```", CHAIN),
    "an answer in a thought": ("<think>\n```python\ndef f(x): return 4711\n```", "assert f(1) == 4711"),
    "a draft in a thought": ("<think>```python\ndef f(x): return 4711\n```</think>\n```python\ndef f(x): return 1\n```", "assert f(1) == 4711"),
    "YES or NO by the limit of the output": ("import resource\nn = resource.getrlimit(resource.RLIMIT_FSIZE)[0]\nprint('YES' if n % 16 == 12 else 'NO' if n % 16 == 8 else 'MAYBE')", PROGRAM),
    "YES or NO by a file size": ("import os\nprint({os.fstat(fd).st_size for fd in (0, 1)})", PROGRAM),
    "a program that leaves before it prints": ("import os\nprint('YES')\nos._exit(0)", PROGRAM),
    "a program that fails after it prints": ("print(['NO', 'YES'][int(input()) % 2], flush=True)\nraise ValueError", PROGRAM),
    "a program that looks for outputs": ("import glob\nprint([open(p).read() for p in glob.glob('/proc/*/fd/*')])", PROGRAM),
}  # fmt: skip
SQUARE = "assert f(3) == 9\nassert f(-2) == 4"
POINT = "assert p(1) == (1, 2)\nassert isinstance(p(1), tuple) and p(1)[1] == 2"
ODD = {
    "a usage block": ("```python\ndef f(x): return x * x\n```\nUse it:\n```python\nprint(f(undefined))\n```", SQUARE),
    "usage in the same block": ("```python\ndef f(x): return x * x\nprint(f(3))\nassert f(2) == 4\n```", SQUARE),
    "usage under main": ("def f(x): return x * x\nif __name__ == '__main__':\n    f(input())", SQUARE),
    "a fence in a list": ("1. First:\n\n   ```python\n   def f(x):\n       return x * x\n   ```\n2. Done.", SQUARE),
    "a fence of tildes": ("~~~python\ndef f(x): return x * x\n~~~", SQUARE),
    "a fence of four": ("````python\ndef f(x):\n    '''\n    ```\n    f(1)\n    ```\n    '''\n    return x * x\n````", SQUARE),
    "an open fence": ("```python\ndef f(x): return x * x", SQUARE),
    "no fence": ("def f(x): return x * x", SQUARE),
    "an upper-case mark": ("```Python\ndef f(x): return x * x\n```", SQUARE),
    "a mark with a version": ("```python3\ndef f(x): return x * x\n```", SQUARE),
    "a mark in braces": ("```{.python .numberLines}\ndef f(x): return x * x\n```", SQUARE),
    "carriage returns": ("```python\r\ndef f(x):\r\n    return x * x\r\n```\r\n", SQUARE),
    "a fence without a mark": ("```\ndef f(x): return x * x\n```", SQUARE),
    "an output block after it": ("```python\ndef f(x): return x * x\n```\nOutput:\n```\n9\n```", SQUARE),
    "a shell block before it": ("```bash\npip install x\n```\n```python\ndef f(x): return x * x\n```", SQUARE),
    "imports in one block": ("```python\nimport math\n```\n```python\ndef f(x): return int(math.pow(x, 2))\n```", SQUARE),
    "a helper in one block": ("```python\ndef g(x): return x\n```\n```python\ndef f(x): return g(x) * x\n```", SQUARE),
    "a better second try": ("```python\ndef f(x): return x\n```\nNo:\n```python\ndef f(x): return x * x\n```", SQUARE),
    "a first try that fails": ("```python\nf = 1 / 0\n```\n```python\ndef f(x): return x * x\n```", SQUARE),
    "after a thought": ("<think>```python\ndef f(x): return 1\n```</think>```python\ndef f(x): return x * x\n```", SQUARE),
    "inline code before it": ("Use `f` and ```f(x)``` here.\n```python\ndef f(x): return x * x\n```", SQUARE),
    "a lambda": ("f = lambda x: x * x", SQUARE),
    "a partial": ("import functools\nf = functools.partial(lambda y, x: x ** y, 2)", SQUARE),
    "a callable object": ("class F:\n    def __call__(self, x): return x * x\nf = F()", SQUARE),
    "a cached function": ("import functools\n@functools.lru_cache(None)\ndef f(x): return x * x", SQUARE),
    "annotations": ("from __future__ import annotations\nfrom typing import Optional\ndef f(x: Optional[int]) -> Undefined: return x * x", SQUARE),
    "a global counter": ("n = 0\ndef f(x):\n    global n\n    n += 1\n    return x * x", SQUARE),
    "a float for an int": ("def f(x): return float(x * x)", SQUARE),
    "an IntEnum": ("import enum\nclass E(enum.IntEnum):\n    A = 9\n    B = 4\ndef f(x): return E.A if x == 3 else E.B", SQUARE),
    "a fraction": ("from fractions import Fraction\ndef f(x): return Fraction(x) ** 2", SQUARE),
    "a named tuple": ("from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef p(n): return P(n, 2)", POINT),
    "a typed named tuple": ("from typing import NamedTuple\nclass P(NamedTuple):\n    x: int\n    y: int = 2\ndef p(n): return P(n)", POINT),
    "a timedelta": ("from datetime import timedelta\ndef f(n): return timedelta(days=n)", "from datetime import timedelta\nassert f(2) == timedelta(2) and f(1).days == 1 and f(1).total_seconds() == 86400"),
    "a datetime": ("import datetime\ndef f(n): return datetime.datetime(2024, 1, n, 5)", "import datetime\nassert f(2) == datetime.datetime(2024, 1, 2, 5) and f(3).day == 3"),
    "a defaultdict": ("from collections import defaultdict\ndef f(t):\n    d = defaultdict(int)\n    for c in t: d[c] += 1\n    return d", "assert f('aab') == {'a': 2, 'b': 1}"),
    "a generator": ("def f(n):\n    for i in range(n): yield i", "assert list(f(3)) == [0, 1, 2] and sum(f(4)) == 6"),
    "a map": ("def f(xs): return map(abs, xs)", "assert list(f([-1, 2])) == [1, 2]"),
    "keys of a dict": ("def f(d): return d.keys()", "assert sorted(f({'b': 1, 'a': 2})) == ['a', 'b']"),
    "a large int": ("def f(n): return 7 ** n", "assert f(6000) == 7 ** 6000"),
    "infinity and NaN": ("def f(n): return float(n)", "import math\nassert f('inf') == math.inf and math.isnan(f('nan'))"),
    "deep lists": ("def f(n):\n    x = []\n    for _ in range(n): x = [x]\n    return x", "x = f(250)\nfor _ in range(250):\n    x = x[0]\nassert x == []"),
    "a sort in place": ("def f(xs): xs.sort()", "xs = [2, 1]\nassert f(xs) is None\nassert xs == [1, 2]"),
    "a matrix in place": ("def f(m):\n    for r in m: r.reverse()", "def check(g):\n    m = [[1, 2], [3, 4]]\n    g(m)\n    assert m == [[2, 1], [4, 3]]\ncheck(f)"),
    "a seed of the tests": ("import random\ndef f(xs):\n    xs = xs[:]\n    random.shuffle(xs)\n    return xs", "import random\nrandom.seed(7)\ny = [1, 2, 3, 4]\nrandom.shuffle(y)\nrandom.seed(7)\nassert f([1, 2, 3, 4]) == y"),
    "an error of a builtin class": ("def f(x):\n    if x < 0: raise ValueError('negative: ' + str(x))\n    return x", "import pytest\nwith pytest.raises(ValueError, match='negative: -1') as info:\n    f(-1)\nassert 'negative' in str(info.value)\nassert f(1) == 1"),
    "an error of its class": ("class Low(ValueError): pass\ndef f(x):\n    if x < 0: raise Low('no')\n    return x", "try:\n    f(-1)\n    assert False\nexcept Low as e:\n    assert str(e) == 'no'\ntry:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass"),
    "an assert inside of raises": ("def f(x):\n    assert x > 0\n    return x", "import pytest\nwith pytest.raises(AssertionError):\n    assert f(-1) == 1"),
    "a chain of methods": ("class Q:\n    def __init__(self): self.x = []\n    def add(self, y):\n        self.x.append(y)\n        return self\n    def size(self): return len(self.x)", "q = Q()\nq.add(1)\nq.add(2)\nassert q.size() == 2"),
    "a cache with a capacity": ("from collections import OrderedDict\nclass LRUCache:\n    def __init__(self, n): self.n, self.d = n, OrderedDict()\n    def get(self, k):\n        if k not in self.d: return -1\n        self.d.move_to_end(k)\n        return self.d[k]\n    def put(self, k, v):\n        self.d[k] = v\n        self.d.move_to_end(k)\n        if len(self.d) > self.n: self.d.popitem(last=False)", "c = LRUCache(1)\nc.put(1, 1)\nassert c.get(1) == 1\nc.put(2, 2)\nassert c.get(1) == -1 and c.get(2) == 2"),
    "a static method": ("class Solution:\n    @staticmethod\n    def f(x): return x * x", "assert Solution().f(3) == 9"),
    "a dataclass": ("from dataclasses import dataclass\n@dataclass\nclass Box:\n    w: int\n    def area(self): return self.w ** 2", "assert Box(3).area() == 9"),
    "it prints much": ("def f(x):\n    print('debug ' * 10000)\n    return x * x", SQUARE),
    "a program with main": ("def main():\n    print('YES' if int(input()) % 2 else 'NO')\nmain()", PROGRAM),
    "a program that exits": ("import sys\nprint('YES' if int(sys.stdin.readline()) % 2 else 'NO')\nsys.exit(0)", PROGRAM),
    "a program with blanks": ("print('YES  ' if int(input()) % 2 else 'NO', end='\\n\\n')", PROGRAM),
    "a program with the imports before it": ("```python\nimport sys\n```\n```python\nprint('YES' if int(sys.stdin.read()) % 2 else 'NO')\n```", PROGRAM),
    "a program and its recursion": ("import sys\nsys.setrecursionlimit(10**5)\ndef g(n): return n if n < 2 else g(n - 2)\nprint('YES' if g(int(input())) else 'NO')", PROGRAM),
}  # fmt: skip


def scores(table, **limits):
    completions = [code for code, _ in table.values()]
    tests = [tests for _, tests in table.values()]
    found = worker.code_tests(completions=completions, tests=tests, **limits)
    return dict(zip(table, found, strict=True))


def test_the_cheats_score_nothing():
    assert {name: x for name, x in scores(CHEATS, seconds=2.0).items() if x} == {}


def test_correct_answers_of_unusual_form_score_one():
    assert {name: x for name, x in scores(ODD, seconds=20.0).items() if x != 1} == {}


@pytest.mark.parametrize("name", ["assert", "raises", "with", "class"])
def test_the_same_tests_accept_a_correct_answer(name):
    right = {
        "assert": ("def f(x): return 4711", CHAIN),
        "raises": ("def f(x): raise ValueError('negative')", CHEATS["another message than expected"][1]),
        "with": ("def f(x): return 4711", SWALLOW),
        "class": ("print('YES' if int(input()) % 2 else 'NO')", PROGRAM),
    }  # fmt: skip
    assert scores({name: right[name]}, seconds=20.0) == {name: 1.0}
