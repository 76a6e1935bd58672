// A worker: verifies the bytes of a file and answers with the first fault, or null.

import { open } from "../conformance/readers/javascript/rsv.mjs";

onmessage = ({ data }) => {
  try {
    open(data).verify();
    postMessage(null);
  } catch (error) {
    postMessage({ name: error.name, code: error.code, where: error.where, message: error.message });
  }
};
