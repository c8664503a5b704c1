// The whole state in the page's link: a name and a value for each field; files are deflated.

const VERSION = "1";
const PACKED = ["file", "costs", "text"];
export const FIRST = "schedules"; // the tab that the link need not name
const LONGEST = 100_000; // characters of a link

export async function writeLink(values, tab) {
  const parts = [["link", VERSION], ...(tab === FIRST ? [] : [["tab", tab]])];
  for (const [name, value] of Object.entries(values)) parts.push([name, PACKED.includes(name) && value ? await deflated(value) : value]);
  const link = `#${new URLSearchParams(parts)}`;
  if (link.length <= LONGEST) return { link, note: "" };
  const { file, costs, text, ...rest } = values;
  return { link: (await writeLink(rest, tab)).link, note: "The link does not include opened or pasted files, which are too large for it." };
}

// The tab and the values in a link, and what of it cannot be used: sentences with the fields that they are about, empty for those without.
export async function readLink(hash, settings) {
  if (hash.length < 2) return { tab: FIRST, values: settings.opening, notes: [] };
  const values = {};
  const notes = [];
  const given = new URLSearchParams(hash.slice(1));
  const version = given.get("link");
  if (version !== VERSION) return { tab: FIRST, values, notes: [note(version ? `This link was made by another version of the page (${version}, this is ${VERSION}), so the page starts with its defaults: open it with that version of zerobubble.` : "This link is incomplete: its version is missing, so the page starts with its defaults. Copy the whole link.")] };
  const tab = given.get("tab") || FIRST;
  const defaults = { [FIRST]: settings.defaults, blocks: settings.blockDefaults }[tab];
  if (!defaults) return { tab: FIRST, values, notes: [note(`This link opens the tab ${tab.slice(0, 40)}, which this version does not have, so the page starts with its defaults: choose a tab.`)] };
  for (const [name, value] of given) {
    if (name === "link" || name === "tab") continue;
    if (!(name in defaults)) notes.push(note(`The link has ${name.slice(0, 40)}, which this version does not know: it is left out.`));
    else if (PACKED.includes(name) && value) await inflated(value).then((text) => (values[name] = text), () => notes.push(note(`The link's ${name} is damaged: it is left out. Open the file again.`, name)));
    else values[name] = value;
  }
  const schedules = settings.schedules.map((one) => one.name);
  for (const [name, known] of Object.entries({ schedule: schedules, versus: schedules, block: settings.blocks, ...settings.choices })) {
    if (!values[name] || known.includes(values[name])) continue;
    notes.push(note(`The link has the ${name} ${values[name].slice(0, 40)}, which is not known here: choose another.`, name));
    delete values[name];
  }
  return { tab, values, notes };
}

function note(error, field = "") {
  return { error, field };
}

async function deflated(text) {
  const stream = new Blob([text]).stream().pipeThrough(new CompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  let letters = "";
  for (const byte of bytes) letters += String.fromCharCode(byte);
  return btoa(letters).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
}

async function inflated(text) {
  const letters = atob(text.replaceAll("-", "+").replaceAll("_", "/"));
  const bytes = Uint8Array.from(letters, (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).text();
}
