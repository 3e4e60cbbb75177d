// The Python program that renders conversations: told the folder and what to train on as its arguments, it answers with
// a line of JSON when it is ready, then with one for each line of standard input: {"text", "said"} or {"error"}; "said"
// are the places of what the assistant says in the text's UTF-8, [begin, end) each. See chat_template.h.
#pragma once

namespace strata {

inline constexpr const char* kChatTemplateScript = R"python(
import datetime, json, os, re, secrets, sys, traceback

def say(**answer):
    print(json.dumps(answer), flush=True)

def fail(message):
    say(error=message)
    sys.exit()

try:
    import jinja2, jinja2.ext, jinja2.sandbox
except ImportError:
    fail("chat templates need jinja2 for " + sys.executable + "; install the package python3-jinja2.")

folder, train_on = sys.argv[1:3]
jinja_path, config_path = (os.path.join(folder, name) for name in ("chat_template.jinja", "tokenizer_config.json"))

def text_of(path):
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as problem:
        fail(f"{path}: cannot be read: {problem}.")

def object_of(path):
    try:
        value = json.loads(text_of(path) or "{}")
    except ValueError as problem:
        fail(f"{path}: is not JSON: {problem}.")
    if not isinstance(value, dict):
        fail(f"{path}: is no JSON object.")
    return value

# Marks what a model says; as text it is its content, between marks that no text has.
BEGIN, END = ("\x00" + secrets.token_hex(16) for _ in range(2))
class Generation(jinja2.ext.Extension):
    tags = {"generation"}
    found = False
    def parse(self, parser):
        Generation.found = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        mark = lambda text: jinja2.nodes.Output([jinja2.nodes.TemplateData(text)], lineno=line)
        return jinja2.nodes.Scope([mark(BEGIN), *body, mark(END)], lineno=line)

def raise_exception(message):
    raise jinja2.TemplateError(message)

def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
environment.filters["tojson"] = to_json
environment.globals["raise_exception"] = raise_exception
environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)

def told(problem):
    if isinstance(problem, jinja2.TemplateSyntaxError):
        line = problem.lineno
    else:
        lines = [f.lineno for f in traceback.extract_tb(problem.__traceback__) if f.filename == "<template>"]
        line = lines[-1] if lines else 1
    message = " ".join(str(problem).split()) or type(problem).__name__
    return (f"{jinja_path}:{line}: " if source_is_jinja else f"{config_path}: chat_template, line {line}: ") + message

config = object_of(config_path)
source = text_of(jinja_path)
source_is_jinja = source is not None
if not source_is_jinja:
    source = config.get("chat_template")
if source is None:
    fail(f"{folder}: has no chat template: neither chat_template.jinja nor \"chat_template\" in tokenizer_config.json.")
if isinstance(source, str) and not source.strip():
    fail(f"{folder}: has an empty chat template.")
# Either one template, or several with names.
sources = {"default": source} if isinstance(source, str) else {}
if isinstance(source, list) and all(isinstance(one, dict) for one in source):
    sources = {one.get("name"): one.get("template") for one in source}
if not all(isinstance(one, str) for one in sources.values()) or "default" not in sources:
    fail(f"{config_path}: chat_template must be a string, or a list of names and templates with a \"default\".")
templates, marks_said = {}, {}
try:
    for name, text in sources.items():
        Generation.found = False
        templates[name] = environment.from_string(text)
        marks_said[name] = Generation.found
except Exception as problem:
    fail(told(problem))

names = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
variables = {}
for values in (object_of(os.path.join(folder, "special_tokens_map.json")), config):
    for name in [one + "_token" for one in names]:
        value = values.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if value is not None:
            variables[name] = value

def size(text):
    return len(text.encode("utf-8", "surrogatepass"))

# Text without marks, and what was between them.
def without_marks(text):
    plain, said, depth, at = [], [], 0, 0
    for part in re.split("(" + BEGIN + "|" + END + ")", text):
        if part == BEGIN:
            if depth == 0:
                said.append([at, at])
            depth += 1
        elif part == END:
            depth -= 1
            said[-1][1] = at
        else:
            plain.append(part)
            at += size(part)
    return "".join(plain), said

# What each message of the assistant adds to the text, where a template does not mark it.
def said_by_difference(render, messages, whole):
    said = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = render(messages[:i], True), render(messages[:i + 1], False)
        if not (whole.startswith(after) and after.startswith(before)):
            raise jinja2.TemplateError(
                f"what the assistant says in messages[{i}] cannot be told from the text: the template marks it with no "
                "{% generation %} block and renders a conversation otherwise when it goes on; put such blocks into the "
                "template, or prepare with --train-on all")
        said.append([size(before), size(after)])
    return said

say(text="", said=[])
for line in sys.stdin.buffer:
    try:
        conversation = json.loads(line)
        tools = conversation.get("tools")
        name = "tool_use" if tools and "tool_use" in templates else "default"
        def render(messages, prompt):
            return templates[name].render(messages=messages, tools=tools, documents=None, add_generation_prompt=prompt,
                                          **variables)
        text, said = without_marks(render(conversation["messages"], False))
        if train_on == "assistant" and not marks_said[name]:
            said = said_by_difference(render, conversation["messages"], text)
        say(text=text, said=said)
    except Exception as problem:
        say(error=told(problem))
)python";

}  // namespace strata
