"""The gateway: OpenAI's HTTP interface in front of the leaders of one deployment.

| module       | what it is                                                                      | kind  |
|--------------|---------------------------------------------------------------------------------|-------|
| __main__     | the process: flags, ports, signals                                              | shell |
| settings     | the flags and the environment as one value                                      | pure  |
| connections  | bounds on HTTP connections: their number and their time-outs                    | shell |
| app          | HTTP routes, errors in the shape of each interface                              | shell |
| body_reader  | bodies as they come: key, kind, size, and few threads that work on them         | shell |
| parameters   | request bodies: what is taken, what is refused by name                          | pure  |
| bodies       | bytes to bodies, prompts and messages: counted before they are built            | pure  |
| prompts      | bodies to token ids and generation requests                                     | pure  |
| tokenization | text to tokens and back for clients                                             | pure  |
| unserved     | paths that are refused by name                                                  | pure  |
| openapi      | the description of the interface                                                | pure  |
| shapes       | OpenAI's answers and chunks, completions and chat                               | pure  |
| chunks       | OpenAI's envelope around them                                                   | pure  |
| dialect      | how an interface tells an answer                                                | pure  |
| messages     | Anthropic's Messages: bodies, the chats they mean, answers, errors              | pure  |
| responses    | OpenAI's Responses: bodies, the chats they mean, answers                        | pure  |
| turns        | the parts of their conversations as messages of a chat                          | pure  |
| blocks       | an answer as the blocks that they tell                                          | pure  |
| answers      | runs a prepared request, whole or as server-sent events                         | shell |
| choice       | token events to text of one choice                                              | pure  |
| detokenizer  | tokens to text without half characters                                          | pure  |
| stop_strings | stop strings across token boundaries                                            | pure  |
| tokenizer    | the model's tokenizer, chat template and stop tokens                            | files |
| dispatcher   | requests to leaders and back; holds them while there is no leader               | shell |
| journal      | running requests and the law that no token comes twice or is skipped            | pure  |
| suspicion    | which requests may be the reason of failed steps                                | pure  |
| routing      | which replica gets a request                                                    | pure  |
| asked        | whether an answer is kept, and where it goes on                                 | pure  |
| keeper       | answers that outlive their connections                                          | shell |
| twins        | tells the other gateways what this one keeps                                    | shell |
| positions    | what the id of a stream's event says                                            | pure  |
| leader_link  | one authenticated connection to a leader                                        | shell |
| control      | the control port                                                                | shell |
| metrics      | Prometheus, under vLLM's names where they exist                                 | shell |
| api_keys     | who may ask                                                                     | files |
| errors       | what can go wrong, by what the caller should do next                            | pure  |
"""
