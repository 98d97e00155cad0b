"""Anthropic's Messages interface over the same chats: bodies, their translation, answers and errors."""
