// The page: the connection to the server, the API key, and which view is shown.

const KEY = "zipage-api-key";

class KeyNeeded extends Error {}

// fetch that sends the key; raises the server's own message.
async function request(path, body, signal) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  const response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal, cache: "no-store" });
  if (response.status === 401) {
    askForKey(Boolean(key));
    throw new KeyNeeded("an API key is needed");
  }
  if (!response.ok) {
    const answer = await response.json().catch(() => null);
    throw new Error(answer?.error?.message ?? `the server answered ${response.status}`);
  }
  return response;
}

// Events of a stream: {name, data}.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
      let name = "message", data = "";
      for (const line of text.slice(0, end).split("\n")) {
        if (line.startsWith("event: ")) name = line.slice(7);
        else if (line.startsWith("data: ")) data = line.slice(6);
      }
      yield { name, data };
    }
  }
}

let useKey = () => {};

function askForKey(wrong) {
  sessionStorage.removeItem(KEY);
  byId("key-form").hidden = false;
  byId("key-error").textContent = wrong ? "This key was refused." : "";
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value.trim());
  byId("key").value = "";
  byId("key-form").hidden = true;
  useKey();
});

function setStatus(kind, text) {
  byId("status").className = `status ${kind}`;
  if (byId("status-text").textContent !== text) byId("status-text").textContent = text;
}

const live = new LiveView();
const retention = new RetentionView(request);

// Follows the server's figures for ever, also over its restarts.
async function follow() {
  for (let wait = 1000; ; wait = Math.min(wait * 1.5, 8000)) {
    try {
      for await (const { name, data } of events(await request("/dashboard/events"))) {
        const told = JSON.parse(data);
        if (name === "hello") {
          wait = 1000;
          byId("model").textContent = told.model;
          document.title = `${told.model} · Zipage`;
          live.begin(told);
          retention.begin(told);
          setStatus("ok", `live · ${told.version}`);
        } else if (name === "sample") {
          live.add(told);
          if (told.up) setStatus("ok", "live");
          else setStatus("bad", "the engine is down");
        }
      }
      setStatus("bad", "the server went away, connecting again");
    } catch (error) {
      if (error instanceof KeyNeeded) {
        setStatus("", "waiting for the API key");
        await new Promise((resolve) => { useKey = resolve; });
        setStatus("", "connecting");
        continue;
      }
      setStatus("bad", "no connection, trying again");
    }
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}

function route() {
  const name = location.hash === "#retention" ? "retention" : "live";
  for (const each of ["live", "retention"]) {
    byId(each).hidden = each !== name;
    const link = byId("nav-" + each);
    if (each === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  live.render();
  retention.drawMemory();
}

addEventListener("hashchange", route);
route();
follow();
