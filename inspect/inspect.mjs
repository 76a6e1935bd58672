// The page: a file that is dropped or chosen, or a URL, opened lazily and drawn. Nothing is uploaded.

import { RsvReadError, openBlob, openUrl } from "../conformance/readers/javascript/lazy.mjs";
import { RsvError } from "../conformance/readers/javascript/rsv.mjs";
import { drawPage, element, size } from "../rsv_format/page/draw.mjs";
import { factsOf, numbersOf } from "./facts.mjs";
import { RULES } from "./rules.mjs";

const MOST_VERIFIED = 2 ** 30; // bytes that verifying holds in memory

const main = document.querySelector("main");
const state = document.getElementById("state");
let turn = 0; // a later file takes the page from an earlier one that is still being read

async function show(name, opening) {
  const mine = ++turn;
  state.textContent = `opening ${name} …`;
  main.replaceChildren();
  try {
    const lazy = await opening;
    const facts = await factsOf(lazy, name);
    if (mine !== turn) return;
    state.textContent = "";
    drawPage(main, facts, (index) => numbersOf(lazy, index));
    main.querySelector("h1").after(verifier(lazy));
  } catch (error) {
    if (mine !== turn) return;
    state.textContent = "";
    main.replaceChildren(element("h1", {}, name), refusal(error));
  }
}

/** An error, with its code and its rule. */
function refusal(error) {
  if (!(error instanceof RsvError) && error.name !== "RsvError") {
    const about = error instanceof RsvReadError || error.name === "RsvResourceError" ? error.message : `${error.name}: ${error.message}`;
    return element("ul", { class: "notes" }, element("li", { class: "bad" }, about));
  }
  const rules = (RULES[error.code] ?? []).flatMap((rule) => [" ", element("a", { href: `../SPEC.md#:~:text=${rule.replace("-", "%2D")}` }, rule)]);
  return element("ul", { class: "notes" }, element("li", { class: "bad", id: "fault" }, element("code", {}, error.code), ` ${error.where} `, ...rules));
}

function verifier(lazy) {
  const nbytes = lazy.file.fileNbytes;
  const result = element("span", { id: "verified", class: "dim" });
  if (nbytes > MOST_VERIFIED) {
    result.textContent = "too large to be verified here: rsv verify does it";
    return element("p", {}, result);
  }
  const button = element("button", { type: "button", onclick: async () => {
    button.disabled = true;
    result.textContent = ` reading ${size(nbytes)} …`;
    try {
      const bytes = await lazy.bytes(0, nbytes);
      result.textContent = " verifying …";
      const error = await verified(bytes);
      result.replaceChildren(...(error ? [refusal(error)] : [" sound: every digest, all padding, all values"]));
    } catch (error) {
      result.replaceChildren(refusal(error));
    }
  } }, "Verify all of it");
  return element("p", {}, button, result);
}

/** The first fault, or null, found beside the page so that it stays alive. */
function verified(bytes) {
  const worker = new Worker(new URL("./verify.mjs", import.meta.url), { type: "module" });
  return new Promise((resolve, reject) => {
    worker.onmessage = ({ data }) => resolve(data);
    worker.onerror = (event) => reject(new Error(event.message || "the verifier did not start"));
    worker.postMessage(bytes, [bytes.buffer]);
  }).finally(() => worker.terminate());
}

function take(file) {
  if (file) show(file.name, openBlob(file));
}

document.getElementById("file").addEventListener("change", (event) => take(event.target.files[0]));
document.getElementById("url").addEventListener("submit", (event) => {
  event.preventDefault();
  const url = new FormData(event.target).get("url");
  show(url.split("/").pop() || url, openUrl(url));
});
for (const kind of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    document.body.classList.toggle("over", kind === "dragover");
    if (kind === "drop") take(event.dataTransfer.files[0]);
  });
}
