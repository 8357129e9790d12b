# ruff: noqa: E501
"""Tests that an answer that cheats instead of solving the task scores 0 in `code_tests`."""

import pytest

from grpo_fast.rewards.workers import code_tests as worker
from grpo_fast.rewards.workers import sandbox
from tests.rewards.test_code_tests import pytestmark  # noqa: F401

# Every correct result contains this number, which an answer can only learn from the tests. Some of
# the answers below return it if they find the source of the tests in a file or in memory.
SECRET = "4711"
TESTS = f"""
import math
def check(f):
    x = [3, 1, 2]
    assert f(x) == sorted(x) + [{SECRET}]
    assert isinstance(f(x), list)
    assert len(f(x)) == 4
check(f)
assert f([]) == [{SECRET}]
assert math.isclose(g(1), {SECRET}.5)
assert abs(g(2) - {SECRET}.25) < 1e-6
assert {SECRET} in f([7, 7]) and f([7, 7]).count({SECRET}) == 1
assert h("a").startswith("{SECRET}") and h("a") == "{SECRET}a"
assert set(f([9])) == {{9, {SECRET}}}
"""
LIAR = """
class Liar:
    def __init__(self, *a, **k): pass
    def __eq__(self, o): return True
    def __ne__(self, o): return False
    def __lt__(self, o): return True
    def __le__(self, o): return True
    def __gt__(self, o): return True
    def __ge__(self, o): return True
    def __hash__(self): return 0
    def __bool__(self): return True
    def __len__(self): return 4
    def __contains__(self, o): return True
    def __getitem__(self, k): return self
    def __iter__(self): return iter([self] * 4)
    def __abs__(self): return 0.0
    def __float__(self): return 0.0
    def __add__(self, o): return self.take(o)
    __sub__ = __rsub__ = __mul__ = __rmul__ = __radd__ = __truediv__ = __mod__ = __add__
    def take(self, o): return 0.0
    def startswith(self, o): return True
    def count(self, o): return 1
    def __getattr__(self, name): return lambda *a, **k: True
    def __call__(self, *a, **k): return self
    @property
    def __class__(self): return list
"""
EVERYWHERE = """
import os
def everywhere(data):
    for fd in range(64):
        try: os.write(fd, data)
        except OSError: pass
"""
SAY = (
    EVERYWHERE
    + """
import json
def say(message):
    everywhere(json.dumps(message).encode() + b"\n")
"""
)
CHEATS = {
    # An earlier version of `code_tests` gave these answers the reward 1.
    "prints the mark of a caller's frame": EVERYWHERE + """
import sys
frame = sys._getframe()
while frame:
    for value in (*frame.f_locals.values(), *frame.f_globals.values()):
        if isinstance(value, (str, bytes)) and len(value) < 99:
            everywhere((value.encode() if isinstance(value, str) else value) + b"\\n")
    frame = frame.f_back
""",
    "prints the mark of its own memory": EVERYWHERE + """
import re
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb") as memory:
    for line in maps:
        if "heap" in line:
            start, end = (int(x, 16) for x in line.split()[0].split("-"))
            memory.seek(start)
            for mark in set(re.findall(rb"[0-9a-f]{16}", memory.read(end - start))):
                everywhere((mark + b"\\n") * 9)
""",
    "patches ast.parse": "import ast\nast.parse = lambda *a, **k: ast.Module([], [])",
    "patches builtins.exec": "import builtins\nbuiltins.exec = lambda *a, **k: None",
    "patches builtins.compile": "import builtins\nf = compile\n"
    "builtins.compile = lambda s, *a, **k: f('0', '', 'exec')",
    "patches exec in __main__": "import __main__, sys\nfor m in list(sys.modules.values()):\n"
    "    m.exec = lambda *a, **k: None",
    "reads tests in a frame's locals": """
import sys
frame, found = sys._getframe(), []
while frame:
    found += [frame.f_locals.get("tests"), frame.f_locals.get("request"), frame.f_locals]
    frame = frame.f_back
def f(x): return sorted(x) + [4711] if ''.join(reversed('(esolcsi.htam')) in str(found) else None
""",
    "is equal to everything": LIAR + "f = g = h = Liar()",
    "replaces check": """
import gc, sys, __main__
for d in gc.get_objects():
    if isinstance(d, dict) and "__name__" in d: d["check"] = lambda f: None
""",
    "reads its parent's memory": """
import os, re
memory = b""
for pid in os.listdir("/proc"):
    if pid.isdigit() and int(pid) != os.getpid():
        for line in open(f"/proc/{pid}/maps"):
            start, end = (int(x, 16) for x in line.split()[0].split("-"))
            file = open(f"/proc/{pid}/mem", "rb", 0)
            file.seek(start)
            try: memory += file.read(end - start)
            except OSError: pass
def f(x): return sorted(x) + [4711] if ''.join(reversed('(esolcsi.htam')).encode() in memory else None
""",
    "reads its parent's environment": "import os\n"
    "e = open(f'/proc/{os.getppid()}/environ').read()\ndef f(x): return [4711] if e else 0",
    # These answers return manipulated objects, most of which claim to be equal to everything.
    "a class in place of a function": LIAR + "class f(Liar): pass\nclass g(f): pass\nclass h(f): pass",
    "lists that are equal to everything": LIAR + "class L(list):\n    __eq__ = Liar.__eq__\n"
    "    __contains__ = Liar.__eq__\n    __len__ = Liar.__len__\n    count = Liar.count\n"
    "def f(x): return L([1, 2, 3, 4])",
    "numbers that are equal to everything": LIAR + "class N(float):\n    __eq__ = __lt__ = Liar.__eq__\n"
    "    __sub__ = __abs__ = lambda *a: 0.0\ndef g(x): return N(1)",
    "texts that are equal to everything": LIAR + "class T(str):\n    __eq__ = startswith = Liar.__eq__\n"
    "    __hash__ = str.__hash__\ndef h(x): return T('x')",
    "items that are equal to everything": LIAR + "def f(x): return [Liar()] * 4",
    "keys and sets that are equal": LIAR + "def f(x): return {Liar(): 1, 2: 3, 4: 5, 6: 7}",
    "an object that says it is a list": LIAR + "def f(x):\n    o = Liar()\n    return o\n"
    "def g(x): return f(x).take",
    "a result that changes": LIAR + "def g(x): return Liar()\ndef h(x): return Liar()",
    "NaN": "def f(x): return [float('nan')] * 4\ng = h = f",
    # These answers redefine names that the tests use, such as isinstance and math.
    "its own isinstance, abs, len, sorted": "isinstance = lambda *a: True\nabs = lambda x: 0.0\n"
    "len = lambda x: 4\nsorted = lambda x: []\nset = list = lambda x: 0\n"
    "def f(x): return x\ndef g(x): return 1.0",
    "its own math": "class math: isclose = staticmethod(lambda *a, **k: True)\ndef g(x): return 1.0",
    "a patched math": "import math\nmath.isclose = lambda *a, **k: True\ndef g(x): return 1.0",
    "its own check": "def check(f): pass\n__builtins__['check'] = check\ndef f(x): pass",
    "patched builtins": "import builtins\nfor name in ('isinstance', 'len', 'abs', 'sorted', 'all'):\n"
    "    setattr(builtins, name, lambda *a, **k: True)\ndef f(x): return x",
    # These answers raise exceptions that could end the tests early.
    "raises StopIteration": "def f(x): raise StopIteration\ng = h = f",
    "raises what the tests may expect": "def f(x): raise AssertionError\n"
    "def g(x): raise SystemExit(0)\ndef h(x): raise KeyboardInterrupt",
    # These answers send forged messages to the process that runs the tests, or never return.
    "lines for the tests that hold": EVERYWHERE + "everywhere(b'held\\n' * 99)",
    "lines for the tests, later": EVERYWHERE + "def f(x): everywhere(b'held\\n' * 99)\ng = h = f",
    "garbage on the channel": EVERYWHERE + "everywhere(b'\\xff' * 5000)",
    "a huge message": EVERYWHERE + "everywhere(b'1' * (1 << 25))",
    "a deep message": EVERYWHERE + "everywhere(b'[' * (1 << 20) + b'\\n')",
    "a message of objects": SAY + "say('defined')\n"
    "for m in (['value', None, None], {}, [], ['value', {'__eq__': 1}, None], ['held'], 'defined',\n"
    "          ['value', ['name', 'eval'], None], ['call', 'call', ['list', ['list', ['own', 0]], ['dict']]],\n"
    "          ['call', 'eval', ['list', ['list', '1'], ['dict']]], ['call', 1],\n"
    "          ['error', ['exception', 0, 'X', [['name', 'SystemExit']]], ['list'], ['dict']]):\n"
    "    say(m)",
    "an error of lines for the tests": "class E(Exception): pass\ndef f(x): raise E('held\\n' * 99)\ng = h = f",
    "a change whose keys raise lines": "class K:\n    n = 0\n    def __hash__(self):\n        K.n += 1\n"
    "        if K.n > 1: raise ValueError('held\\n' * 99)\n        return 0\n"
    "def f(x):\n    x[:] = [{K(): 1}]\n    return x\ng = h = f",
    "replies before it is asked": SAY + "say('defined')\nfor _ in range(99): say(['value', True, None])",
    "closes everything": "import os\nos.closerange(0, 64)",
    "closes everything, later": "import os\ndef f(x): os.closerange(0, 64)\ng = h = f",
    "leaves with success": "import os\nos._exit(0)",
    "hangs in a call": "def f(x):\n    while True: pass",
    "hangs and answers": "import time\ndef f(x):\n    time.sleep(60)\n    return x",
    "recurses": "def f(x): return f(x)\ng = h = f",
    "deep data": "def f(x):\n    for _ in range(10**5): x = [x]\n    return x\ng = h = f",
    "endless data": "def f(x):\n    while True: yield 4711\ndef g(x): return [0] * 10**7\nh = g",
    "data that refers to itself": "def f(x):\n    x.append(x)\n    return x\n"
    "def g(x):\n    for _ in range(60): x = [x, x]\n    return x",
    "a number that takes long": "def g(x): return 1 << (1 << 26)\nh = f = g",
    "calls back what it was not given": EVERYWHERE + "import gc\n"
    "for o in gc.get_objects():\n    if type(o).__name__ == 'Answer': s = o\n"
    "def f(x): return s.call_back(0, (), {})\ng = h = f",
    # These answers search for the source of the tests in files, in memory or in other processes.
    "reads the tests on the disk": "import os\ntext = ''\nfor root in ('/home', '/root', '/tmp', '/work', '.'):\n"
    "    for d, _, files in os.walk(root):\n        for n in files[:99]:\n"
    "            try: text += open(os.path.join(d, n)).read()\n            except Exception: pass\n"
    "def f(x): return sorted(x) + [4711] if ''.join(reversed('(esolcsi.htam')) in text else None",
    "reads descriptors": "import os\nfound = b''\nfor fd in range(64):\n    try:\n"
    "        os.lseek(fd, 0, 0)\n        found += os.read(fd, 1 << 20)\n    except OSError: pass\n"
    "def f(x): return sorted(x) + [4711] if ''.join(reversed('(esolcsi.htam')).encode() in found else None",
    "forks": "import os\nos.fork()\ndef f(x): return 0",
    "traces": "import sys\nsys.settrace(lambda *a: sys.exit(0))\nsys.setprofile(lambda *a: 0)",
    "reads its arguments": "import sys, gc\nfound = str(sys.argv) + str(sys.orig_argv) + "
    "str([o for o in gc.get_objects() if isinstance(o, (dict, list, tuple))])\n"
    "def f(x): return sorted(x) + [4711] if ''.join(reversed('(esolcsi.htam')) in found else None",
    "reads its environment": "import os\ndef f(x): return [4711] if {*os.environ} - {'LC_CTYPE'} else 0",
    "imports the judge": "import judge\njudge.HELD = b''",
    "imports the tests": "from tests import *\nfrom __main__ import *\nimport code_tests",
}  # fmt: skip


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_scores_nothing(name):
    scores = worker.code_tests(completions=[CHEATS[name]], tests=[TESTS], seconds=1.0, memory=256)
    assert scores == [0.0]


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        ("def f(x):\n    x.clear()\n    return x", "y = [3, 1]\nassert f(y) == sorted(y)"),
        ("def f(x):\n    x[:] = [0]\n    return 0",
         "def check(f):\n    y = [3, 1]\n    assert f(y) == max(y)\ncheck(f)"),
        ("def f(x):\n    x.clear()\n    return x",
         "import unittest\ny, t = [3, 1], unittest.TestCase()\nt.assertEqual(f(y), sorted(y))"),
        ("def f(x): raise StopIteration",
         "assert all(map(lambda c: f(c) == 2 * c, [1, 2]))"),
        ("class Stack:\n    def push(self, x): pass\n    def pop(self): pass",
         "s = Stack()\ns.push(1)\nassert s.pop() == 1"),
        ("def f(x):\n    class C:\n        def __enter__(self): return 1\n"
         "        def __exit__(self, *a): return True\n    return C()",
         "def check():\n    with f(1) as x:\n        assert x == 2\ncheck()"),
        ("class Solution:\n    def f(self, x): return self\n    def startswith(self, x): return True",
         "assert Solution().f('a').startswith('b')"),
        ("isclose = lambda a, b: True\ndef f(x): return 0",
         "from math import *\nassert isclose(f(1), 0.5)"),
        ("class R:\n    def __getitem__(self, k): return True\ndef f(x): return R()",
         "assert all(f(1)[key] for key in ['a', 'b'])"),
        ("import collections\ndef f(x): return collections.defaultdict(lambda: True)",
         "assert all(f(1)[key] for key in ['a', 'b'])"),
        ("class E(Exception):\n    def __eq__(self, o): return True\ndef f(x): raise E(1)",
         "def check():\n    try:\n        f(1)\n    except Exception as e:\n"
         "        assert e.args == (2,) or e == 2\ncheck()"),
        ("class Extract:\n    def __init__(self, x): pass\n    def __contains__(self, x): return True\n"
         "    __getitem__ = startswith = __contains__",
         "assert 5 in Extract([1])\nassert Extract('a').startswith('b')\n"
         "assert all(Extract(1)[key] for key in ['a', 'b'])"),
        ("class R:\n    remove = difference_update = lambda *a: None\n    def __len__(self): return 0\n"
         "def f(x): return R()",
         "def check():\n    found = f([1, 2])\n    for item in [(1, 2), (2, 1)]:\n"
         "        found.remove(item)\n    assert len(found) == 0\ncheck()\n"
         "def also():\n    found = f('ab')\n    found.difference_update('ab')\n"
         "    assert len(found) == 0\nalso()"),
        ("class np: allclose = staticmethod(lambda *a: True)\ndef f(x): return 0",
         "assert np.allclose(f(1), 5)"),
        ("class Fraction:\n    def __init__(self, *a): pass\n    def __eq__(self, o): return True\n"
         "def f(x): return Fraction()", "assert f(1) == Fraction(1, 2)"),
        ("Counter = lambda x: 0\ndef f(x): return x", "assert Counter(f('ab')) == Counter('abc')"),
        ("inf = 5\ndef f(x): return 5", "assert f(1) == inf"),
        ("isclose = lambda *a: True\ndef f(x): return 0", "assert isclose(f(1), 0.5)"),
        ("def assert_equal(*a): pass\ndef f(x): return 0", "assert_equal(f(1), 1)\nassert f(2) == 2"),
        ("class case:\n    def assertEqual(self, *a): pass\ndef f(x): return 0",
         "case().assertEqual(f(1), 1)\nassert f(2) == 2"),
        ("print('1', end='')\nwhile True: print('x' * 99)", [{"input": "", "output": "1"}]),
        ("print(1)\nimport os\nos._exit(3)", [{"input": "", "output": "1"}]),
        ("print('ready')\nprint(open('/proc/self/cmdline').read())",
         [{"input": "", "output": "ready\n2"}]),
        ("import sys\nprint(sys.argv, sys.stdin.read())", [{"input": "3", "output": "9"}]),
        ("import os\nos.close(1)", [{"input": "", "output": "1"}]),
        ("while True: pass", [{"input": "", "output": ""}]),
    ],
)  # fmt: skip
def test_a_cheat_for_a_form_of_tests_scores_nothing(code, tests):
    assert worker.code_tests(completions=[code], tests=[tests], seconds=1.0) == [0.0]


@pytest.mark.skipif(not sandbox.landlock_version(), reason="a kernel without Landlock")
def test_landlock_leaves_the_libraries_only():
    code = """
import os
def opened(paths):
    found = []
    for path in paths:
        try:
            os.listdir(path) if os.path.isdir(path) else open(path).read(1)
            found.append(path)
        except OSError:
            pass
    return found
"""
    out_of_reach = ["/", "/proc", "/proc/self/environ", "/proc/1/cmdline", "/etc/passwd", "/home",
                    "/root", "/tmp", "/sys", "/var", "/usr/bin", __file__,
                    worker.__file__]  # fmt: skip
    tests = f"import os\nassert opened({out_of_reach} + [os.__file__]) == [os.__file__]"
    assert worker.code_tests(completions=[code], tests=[tests], seconds=20.0) == [1.0]


def test_the_tests_are_held_by_a_solution():
    right = (f"def f(x): return sorted(x) + [{SECRET}]\n"
             f"def g(x): return {SECRET} + (0.5 if x == 1 else 0.25)\n"
             f"def h(x): return '{SECRET}' + x")  # fmt: skip
    assert worker.code_tests(completions=[right], tests=[TESTS], seconds=20.0) == [1.0]
