// Pointer, touch, wheel, keys and buttons, turned into calls of the viewer.

import { LEFT, RIGHT } from "./layout.js";

const TAP = 6; // pixels that a finger may move and still tap

export function listen(viewer) {
  listenToPointers(viewer);
  const { over } = viewer;
  over.addEventListener("wheel", (event) => wheel(viewer, event), { passive: false });
  over.addEventListener("blur", () => viewer.select(null));
  over.addEventListener("dblclick", () => viewer.range(0, viewer.total));
  over.addEventListener("keydown", (event) => key(viewer, event));
  listenToButtons(viewer);
}

// The page scrolls with the wheel as pages do; with Ctrl it zooms, as pinching a trackpad does, sideways it moves.
function wheel(viewer, event) {
  const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
  if (!event.ctrlKey && !sideways) return;
  event.preventDefault();
  if (event.ctrlKey) viewer.zoom(Math.exp(event.deltaY * 0.004), event.offsetX);
  else viewer.move(((event.deltaX || event.deltaY) / viewer.width) * (viewer.to - viewer.from));
}

function listenToPointers(viewer) {
  const { over } = viewer;
  const down = new Map();
  let held = null;
  const hold = () => {
    const [a, b] = [...down.values()];
    const middle = b ? (a.x + b.x) / 2 : a.x;
    held = { time: viewer.time(middle), apart: b ? Math.max(20, Math.abs(a.x - b.x)) : 0, span: viewer.to - viewer.from, moved: held ? held.moved : 0 };
  };
  over.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "mouse" && event.button) return;
    down.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
    over.setPointerCapture(event.pointerId);
    hold();
  });
  over.addEventListener("pointermove", (event) => {
    if (!down.has(event.pointerId)) {
      if (!down.size) viewer.select(viewer.at(event.offsetX, event.offsetY + viewer.offset));
      return;
    }
    held.moved += Math.abs(event.offsetX - down.get(event.pointerId).x);
    down.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
    if (held.moved > TAP) drag(viewer, [...down.values()], held);
  });
  const release = (event) => {
    const point = down.get(event.pointerId);
    const tapped = held && held.moved <= TAP && event.type === "pointerup";
    down.delete(event.pointerId);
    if (point && tapped && !down.size) viewer.select(viewer.at(point.x, point.y + viewer.offset));
    if (down.size) hold();
    else held = null;
    over.classList.toggle("dragging", down.size > 0);
  };
  over.addEventListener("pointerup", release);
  over.addEventListener("pointercancel", release);
  over.addEventListener("pointerleave", (event) => {
    if (event.pointerType === "mouse" && !down.size) viewer.select(null);
  });
}

// One pointer moves, two zoom: what was below them stays there.
function drag(viewer, [a, b], held) {
  viewer.over.classList.add("dragging");
  const middle = b ? (a.x + b.x) / 2 : a.x;
  const span = b ? Math.min(viewer.total, (held.span * held.apart) / Math.max(20, Math.abs(a.x - b.x))) : held.span;
  const share = (middle - LEFT) / (viewer.width - LEFT - RIGHT);
  viewer.range(held.time - share * span, held.time + (1 - share) * span);
}

function key(viewer, event) {
  const page = 0.8 * (viewer.to - viewer.from);
  const actions = {
    "ArrowRight": () => viewer.step(1), "ArrowLeft": () => viewer.step(-1), "ArrowDown": () => viewer.jump(1), "ArrowUp": () => viewer.jump(-1),
    "PageDown": () => viewer.move(page), "PageUp": () => viewer.move(-page), "Home": () => viewer.move(-viewer.total), "End": () => viewer.move(viewer.total),
    "+": () => viewer.zoom(0.7), "=": () => viewer.zoom(0.7), "-": () => viewer.zoom(1 / 0.7), "0": () => viewer.range(0, viewer.total),
    "Enter": () => viewer.follow(), "Escape": () => viewer.select(null), " ": () => document.getElementById("play").click(),
  };
  if (!actions[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  actions[event.key]();
}

function listenToButtons(viewer) {
  const actions = {
    "zoom-in": () => viewer.zoom(0.6), "zoom-out": () => viewer.zoom(1 / 0.6), "zoom-all": () => viewer.range(0, viewer.total),
    "taller": () => viewer.scaleRows(1.4), "lower": () => viewer.scaleRows(1 / 1.4), "dark": () => viewer.theme.toggle(),
  };
  for (const [id, action] of Object.entries(actions)) document.getElementById(id).addEventListener("click", action);
  for (const button of document.querySelectorAll(".toggles button")) {
    button.addEventListener("click", () => {
      const on = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", `${on}`);
      if (button.id === "textures") setTextures(viewer, on);
      else viewer.show(button.id, on);
    });
  }
}

// One pattern for each kind, in the order of the table.
export function setTextures(viewer, on) {
  const textures = ["", "level", "upright", "rising", "falling"];
  viewer.timelines[0].kinds.forEach((kind, code) => (kind.texture = on ? textures[code % textures.length] : ""));
  viewer.redraw();
}
