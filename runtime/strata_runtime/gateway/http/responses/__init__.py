"""OpenAI's Responses interface over the same chats, without any state: bodies, their translation and answers."""
