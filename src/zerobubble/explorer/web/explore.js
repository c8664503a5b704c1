// The explorer: tabs with fields and answers, when to ask the server, and the link. `data-state` is "ready" when nothing is pending.

import { Theme } from "./theme.js";
import { element } from "./words.js";
import { Asker } from "./asker.js";
import { FIRST, readLink, writeLink } from "./link.js";
import { Schedules } from "./schedules.js";
import { Tabs } from "./tabs.js";
import { Workshop } from "./workshop.js";

const SLOW_MS = 500; // an answer that takes longer is announced
const settings = JSON.parse(document.getElementById("settings").textContent);
const page = document.documentElement;

function mayNotFail(work) {
  work.catch((error) => {
    page.dataset.error = `${error}`;
    throw error;
  });
}

async function startExplorer() {
  const notice = element("p", "", { class: "notice", role: "status", id: "notice" });
  const computing = element("p", "computing…", { class: "computing", role: "status", id: "computing", hidden: "" });
  document.body.append(computing);
  const [theme, asker] = [new Theme(), new Asker()];
  const [first, second] = ["explorer", "workshop"].map((id) => document.getElementById(id));
  const openSchedule = (text, name) => {
    parts[FIRST].fields.use("file", text, name);
    choose(FIRST);
  };
  let [timer, changes, tab, lastLink, lastNames, isEdit] = [0, 0, FIRST, "", "", false];

  // Ask after a pause without a change; an answer to what has changed since is let go.
  const later = () => {
    page.dataset.state = "waiting";
    changes += 1;
    isEdit = true;
    clearTimeout(timer);
    timer = setTimeout(() => mayNotFail(askNow()), parts[tab].pause);
  };
  const parts = { [FIRST]: new Schedules(first, theme, settings, () => later()), blocks: new Workshop(second, theme, settings, { changed: () => later(), openSchedule }) };
  const titles = [{ name: FIRST, title: "Schedules", home: first }, { name: "blocks", title: "Building blocks", home: second }];
  const tabs = new Tabs(document.getElementById("tabs"), titles, (name) => choose(name));
  document.getElementById("tabs").append(notice);

  function choose(name) {
    if (name === tab) return;
    turn(name);
    later();
  }

  function turn(name) {
    if (name !== tab) parts[tab].leave();
    tab = name;
    tabs.show(name);
  }

  async function askNow() {
    const [part, mine, values] = [parts[tab], changes, parts[tab].values()];
    const slow = setTimeout(() => (computing.hidden = false), SLOW_MS);
    const answer = await asker.ask(part.path, values);
    clearTimeout(slow);
    if (answer === null || mine !== changes) return;
    computing.hidden = true;
    part.showProblem(answer);
    if (!answer.error) await part.show(answer, values);
    const { link, note } = await writeLink(values, tab);
    if (mine !== changes) return;
    if (note) notice.textContent = note;
    keep(link);
    page.dataset.state = "ready";
  }

  // Back undoes the change of a field: further changes of the same field replace its entry in the history.
  function keep(link) {
    const names = changedNames(lastLink, link);
    const pushes = isEdit && link !== lastLink && names !== lastNames;
    history[pushes ? "pushState" : "replaceState"](null, "", link);
    if (!isEdit || names) lastNames = isEdit ? names : "";
    [lastLink, isEdit] = [link, false];
  }

  async function openLink() {
    if (location.hash === lastLink && lastLink) return;
    page.dataset.state = "waiting";
    const { tab: named, values, notes } = await readLink(location.hash, settings);
    notice.textContent = notes.map((one) => one.error).join(" ");
    turn(named);
    parts[named].set(values, notes);
    [changes, isEdit] = [changes + 1, false];
    clearTimeout(timer);
    await askNow();
  }

  for (const part of Object.values(parts)) part.set({}, []);
  openDropped((file) => parts[tab].open(file));
  window.addEventListener("hashchange", () => mayNotFail(openLink()));
  await openLink();
  page.dataset.shown = `${Math.round(performance.now())}`;
}

// The names of what differs between two links.
function changedNames(before, after) {
  const [old, now] = [before, after].map((link) => new URLSearchParams(link.slice(1)));
  return [...new Set([...old.keys(), ...now.keys()])].filter((name) => old.get(name) !== now.get(name)).join();
}

// A file that is dropped anywhere on the page is opened in it, and not in its place.
function openDropped(open) {
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    for (const file of event.dataTransfer.files) mayNotFail(open(file));
  });
}

mayNotFail(startExplorer());
