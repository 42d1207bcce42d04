"""Server of OpenEnv's WebSocket protocol with a sum as its environment; prints its port.

An episode begins at the seed; each action adds its `message`, an integer, and is rewarded with it;
0 ends the episode. The path says how many sessions may be open and what happens to another one:
/ws 50, /silent/N closed without a word, /loud/N closed after an error message. /elsewhere/PORT
redirects to another port. /tools has tools and takes no message, /empty has none.
"""

import asyncio
import json
import os
from collections import Counter
from http import HTTPStatus

from websockets.asyncio.server import serve
from websockets.datastructures import Headers
from websockets.http11 import Response

num_open: Counter[str] = Counter()


async def serve_session(connection):
    path = connection.request.path
    kind, _, limit = path.strip("/").partition("/")
    if num_open[path] >= int(limit or 50):
        if kind == "loud":
            await connection.send(make_error("CAPACITY_REACHED", "full"))
        return
    num_open[path] += 1
    try:
        answer = answer_calls if kind in ("tools", "empty") else answer_messages
        await answer(connection)
    finally:
        num_open[path] -= 1


async def answer_messages(connection):
    total = 0
    async for text in connection:
        message = json.loads(text)
        if message["type"] == "close":
            return
        if message["type"] == "reset":
            total = message["data"]["seed"]
            hint = message["data"].get("hint", "")
            await connection.send(make_observation({"total": str(total), "hint": hint}, None))
            continue
        value = message["data"].get("message")
        if value == "raise":
            await connection.send(make_error("EXECUTION_ERROR", "it broke"))
        elif value == "mumble":
            await connection.send("mumble")
        elif value == "die":
            os._exit(1)
        elif not isinstance(value, int | str) or not str(value).lstrip("-").isdigit():
            reason = {"loc": ["message"], "msg": "Input should be a valid integer"}
            await connection.send(make_error("VALIDATION_ERROR", "Invalid", errors=[reason]))
        else:
            total += int(value)
            done = int(value) == 0
            await connection.send(make_observation({"total": str(total)}, int(value), done=done))


async def answer_calls(connection):
    total = 0
    async for text in connection:
        message = json.loads(text)
        action = message["data"] if message["type"] == "step" else {}
        if message["type"] == "close":
            return
        if message["type"] == "reset":
            total = message["data"]["seed"]
            await connection.send(make_observation({}, None))
        elif action["type"] == "list_tools":
            has_tools = connection.request.path.startswith("/tools")
            await connection.send(make_observation({"tools": TOOLS if has_tools else []}, None))
        else:
            number, error, result = action["arguments"].get("number", 0), None, None
            await asyncio.sleep(action["arguments"].get("seconds", 0))
            if action["tool_name"] == "add":
                total += number
                result = {"content": [{"type": "text", "text": str(total)}], "is_error": False}
            elif action["tool_name"] == "fail":
                error = {"error_type": action["arguments"]["kind"], "message": "it broke"}
            done = action["tool_name"] == "finish"
            answer = {"tool_name": action["tool_name"], "result": result, "error": error}
            await connection.send(make_observation(answer, number or None, done=done))


def make_tool(name, **properties):
    schema = {"type": "object", "properties": {key: {"type": t} for key, t in properties.items()}}
    return {"name": name, "description": f"{name} it", "input_schema": schema}


TOOLS = [
    make_tool("add", number="integer", seconds="number"),
    make_tool("fail", kind="string"),
    make_tool("finish", number="integer"),
]


def make_observation(observation, reward, *, done=False):
    data = {"observation": {"metadata": {}, **observation}, "reward": reward, "done": done}
    return json.dumps({"type": "observation", "data": data})


def make_error(code, message, **facts):
    return json.dumps({"type": "error", "data": {"message": message, "code": code, **facts}})


def redirect(connection, request):
    kind, _, port = request.path.strip("/").partition("/")
    if kind != "elsewhere":
        return None
    headers = Headers(Location=f"ws://127.0.0.1:{port}/ws")
    return Response(HTTPStatus.FOUND, "Found", headers)


async def main():
    async with serve(serve_session, "127.0.0.1", 0, process_request=redirect) as server:
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
