"""The gateway's HTTP side: OpenAI's API with its parameters and answers, and two more interfaces to the same chats."""
