"""Presets: addresses, keys and dialects of known providers that speak Chat Completions."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

Preset: TypeAlias = Literal[
    "openai", "deepseek", "mistral", "gemini", "groq", "openrouter", "together", "ollama", "vllm"
]

PRESETS: Final[Mapping[str, Mapping[str, object]]] = MappingProxyType(
    {
        "openai": {"provider": "openai", "api_key_env": "OPENAI_API_KEY"},
        # Thinks by default, and then refuses a forced tool call, and calls in the history without `reasoning_content`.
        # Of response formats it has no JSON Schema.
        "deepseek": {
            "provider": "openai",
            "base_url": "https://api.deepseek.com",
            "api_key_env": "DEEPSEEK_API_KEY",
            "max_tokens_field": "max_tokens",
            "tool_choice": "auto",
            "reasoning": "required",
            "structured_output": False,
        },
        # Refuses every field that it does not know (422), and reports usage unasked.
        "mistral": {
            "provider": "openai",
            "base_url": "https://api.mistral.ai/v1",
            "api_key_env": "MISTRAL_API_KEY",
            "max_tokens_field": "max_tokens",
            "tool_choice": "any",
            "reasoning": "none",
            "stream_usage": False,
        },
        # Gemini 3 refuses tool calls in the history without their signatures, which come in `extra_content`.
        "gemini": {
            "provider": "openai",
            "base_url": "https://generativelanguage.googleapis.com/v1beta/openai",
            "api_key_env": "GEMINI_API_KEY",
        },
        # Takes reasoning back from some of its models only.
        "groq": {
            "provider": "openai",
            "base_url": "https://api.groq.com/openai/v1",
            "api_key_env": "GROQ_API_KEY",
            "reasoning": "none",
        },
        "openrouter": {
            "provider": "openai",
            "base_url": "https://openrouter.ai/api/v1",
            "api_key_env": "OPENROUTER_API_KEY",
            "max_tokens_field": "max_tokens",
        },
        "together": {
            "provider": "openai",
            "base_url": "https://api.together.ai/v1",
            "api_key_env": "TOGETHER_API_KEY",
            "max_tokens_field": "max_tokens",
        },
        "ollama": {
            "provider": "openai",
            "base_url": "http://127.0.0.1:11434/v1",
            "max_tokens_field": "max_tokens",
        },
        "vllm": {"provider": "openai", "base_url": "http://127.0.0.1:8000/v1"},
    }
)
"""Fields of a model's section by the name of the preset; those that the section sets itself win."""
