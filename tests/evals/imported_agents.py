"""Agents in code that do what the imported samples of other projects expect."""

from typing import Any

from bough_server import Context, Message, agent, text_of, tool


@tool
def get_weather(city: str) -> dict[str, Any]:
    """The weather of a city."""
    return {"city": city, "condition": "sunny", "tempC": 26}


@tool
def get_news(city: str) -> dict[str, Any]:
    """The news of a city."""
    return {"city": city, "headline": "Festival downtown, expect traffic."}


@tool
def get_time() -> dict[str, Any]:
    """The time, which is another at every call."""
    return {"time": "now"}


@tool
def get_ticket(city: str) -> dict[str, Any]:
    """The tickets that are left."""
    return {"city": city, "seatsLeft": 25, "time": "now"}


@tool
def trigger_elicitation(missing_entities: list[str], elicitation_prompt: str) -> str:
    """Ask for what is missing."""
    return "asked"


@tool
def book_flight(destination: str, date: str, passenger_name: str) -> str:
    """Book a flight."""
    return "booked"


@agent(description="Advises travelers.", tools=["get_weather", "get_news", "get_time", "get_ticket"])
async def travel(ctx: Context, input: Message) -> str:
    """Calls every tool, in another order than the sample."""
    await ctx.call_tool("get_ticket", city="Shanghai")
    await ctx.call_tool("get_time")
    await ctx.call_tool("get_weather", city="Shanghai")
    await ctx.call_tool("get_news", city="Shanghai")
    return "Mind the traffic."


@agent(description="Books flights.", tools=["trigger_elicitation", "book_flight"])
async def booking(ctx: Context, input: Message) -> str:
    """Asks for what is missing, then books."""
    if "Alice" not in text_of(input):
        prompt = "To book your flight to London, please provide the date of travel and the passenger's full name."
        await ctx.call_tool(
            "trigger_elicitation", missing_entities=["date", "passenger_name"], elicitation_prompt=prompt
        )
        return prompt
    await ctx.call_tool("book_flight", destination="London", date="2026-05-15", passenger_name="Alice")
    return "Successfully booked flight to London on 2026-05-15 for Alice."
