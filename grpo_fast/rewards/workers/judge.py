"""The process that runs the tests of an answer, which runs in another process.

Each name that the tests take from the answer is a proxy here: a call sends plain data to the
answer's process (`answer.py`) and returns plain data that this process has built. An object of the
answer stays where it is, and its proxy never decides how it compares with a value of the tests.
"""

import contextlib
import os

import sandbox
import sources
import wire
from session import Session


def run(source: str, session: Session, out: int) -> None:
    """Run the tests one by one; writes a line for each that holds."""
    namespace = {"__name__": "tests", sources.ASSERTING: session.asserting}
    namespace |= sources.borrowed(source)
    session.uses_objects = sources.uses_objects(source)
    for name in sources.names_of_answer(source):
        with contextlib.suppress(NameError):
            namespace[name] = session.name(name)
    for statement, is_test in sources.statements_of(source):
        try:
            exec(sources.compiled(statement), namespace)
        except BaseException:  # sys.exit() is no way to pass, either
            continue
        if is_test:
            os.write(out, sandbox.HELD)


def main(requested: str, results: str) -> None:
    request = sandbox.request(int(requested))
    out = int(results)
    channel = wire.Channel(*sandbox.take_standard_streams())
    try:
        sandbox.confine(request["memory"], request["seconds"])
        if channel.receive() != "ready":
            raise OSError("expected an answer's process that is ready")
        os.write(out, sandbox.READY)
    except (OSError, wire.Malformed) as error:
        os.write(out, str(error).encode())
        os._exit(1)
    try:
        session = Session(channel)
        if session.exchange()[0] == "value":  # the answer's code ran to its end
            run(request["tests"], session, out)
    finally:
        os._exit(0)
