// Search without a server: browsers start no worker from a file. Where the page is a file, this one runs the script of
// a worker in a hidden frame instead, and hands messages on in both directions. The name of this file tells the plugin
// "offline" that no other script for it is needed from the network.
if (location.protocol === "file:") {
  class FileWorker extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      const load = (source) =>
        new Promise((resolve, reject) => {
          const script = inside.document.createElement("script");
          script.src = source;
          script.onload = resolve;
          script.onerror = reject;
          inside.document.head.append(script);
        });
      inside.importScripts = (...sources) => Promise.all(sources.map(load));
      this.ready = load(new URL(url, document.baseURI).href);
      this.inside = inside;
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.inside.frameElement.remove();
    }
  }
  window.IFrameWorker = window.Worker = FileWorker;
}
