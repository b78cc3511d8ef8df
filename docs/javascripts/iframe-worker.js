// Material searches in a Worker. Browsers refuse workers of pages from files, so there a hidden frame takes its place.
if (location.protocol === "file:") {
  globalThis.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.body.appendChild(document.createElement("iframe"));
      frame.hidden = true;
      this.scope = frame.contentWindow;
      this.scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = frame.contentDocument.createElement("script");
      this.loaded = new Promise(resolve => (script.onload = resolve));
      script.src = url;
      frame.contentDocument.body.appendChild(script);
    }
    postMessage(data) {
      this.loaded.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
  globalThis.Worker = globalThis.IFrameWorker;
}
